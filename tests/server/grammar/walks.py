"""Random walks through a compiled grammar: a model that has no preference at all."""

import json
import random
from collections.abc import Iterator

from model.interface.grammar_state import GrammarState
from server.grammar.compiler import CompiledGrammar, GrammarCompiler
from server.grammar.source import GrammarSource
from server.text.tokenizer import Tokenizer
from tests.fakes import END_OF_TURN, EOS, fake_tokenizer

ENDS = frozenset({EOS, END_OF_TURN})

NESTED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "place": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "place"],
    "additionalProperties": False,
}
ARRAY = {
    "type": "array",
    "items": {"type": "integer", "minimum": -9, "maximum": 99},
    "minItems": 1,
    "maxItems": 4,
}
ENUM = {"enum": ["red", "green", 7, None, True]}
UNION = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"a": {"type": "boolean"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        {"type": "array", "items": {"type": "null"}, "maxItems": 3},
        {"const": "neither"},
    ]
}
RECURSIVE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"enum": [0, 1]},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS = {"nested": NESTED, "array": ARRAY, "enum": ENUM, "union": UNION, "recursive": RECURSIVE}


def allowed(mask: bytes) -> list[int]:
    return [token_id for token_id in range(8 * len(mask)) if mask[token_id >> 3] >> (token_id & 7) & 1]


def walk(
    state: GrammarState, ends: frozenset[int], seed: int, max_tokens: int = 400
) -> tuple[list[int], bool]:
    """(tokens, whether the grammar ended) of one walk."""
    choose = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < max_tokens and not state.is_complete:
        mask = state.mask()
        if mask is None:
            break
        token_id = choose.choice(allowed(mask))
        if token_id in ends:
            return tokens, True
        tokens.append(token_id)
        state.accept(token_id)
    return tokens, state.is_complete


def texts(source: GrammarSource, count: int = 20, max_tokens: int = 400) -> Iterator[tuple[str, bool]]:
    tokenizer = fake_tokenizer()
    grammar = compile_source(source, tokenizer)
    for seed in range(count):
        tokens, ended = walk(grammar.new_state(ENDS), ENDS, seed, max_tokens)
        yield tokenizer.decode(tokens, skip_special_tokens=False), ended


def compile_source(source: GrammarSource, tokenizer: Tokenizer | None = None) -> CompiledGrammar:
    return GrammarCompiler(tokenizer or fake_tokenizer()).compile_now(source)


def source(kind: str, value: object) -> GrammarSource:
    return GrammarSource(kind, tuple(value) if kind == "choice" else value, "the_field")  # type: ignore[arg-type]


def is_compact(text: str) -> bool:
    """No blank outside strings."""
    return json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False).count(" ") == text.count(
        " "
    )
