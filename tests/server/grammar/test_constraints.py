"""What each kind of constraint lets through: every walk that ends is a text of the grammar, and walks reach
all of it."""

import json
import re
from typing import Any

import jsonschema
import pytest

from server.grammar.compiler import CompiledGrammar, GrammarCompiler
from tests.fakes import END_OF_TURN, EOS, FIRST_BYTE, VOCAB_SIZE, fake_tokenizer
from tests.server.grammar.walks import ENDS, SCHEMAS, allowed, compile_source, is_compact, source, texts, walk
from tests.server.text.small_tokenizer import build_tokenizer


def states(kind: str, value: object) -> CompiledGrammar:
    return compile_source(source(kind, value))


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_validates_and_is_compact(name: str) -> None:
    ended = [text for text, has_ended in texts(source("json", SCHEMAS[name])) if has_ended]
    assert len(ended) >= 10, "most walks end"
    assert len(set(ended)) > 1
    for text in ended:
        jsonschema.validate(json.loads(text), SCHEMAS[name])
        assert is_compact(text)


def test_any_object_is_json_as_far_as_it_got() -> None:
    found = list(texts(source("json", {"type": "object"}), count=60, max_tokens=60))
    assert any(ended for _, ended in found)
    for text, ended in found:
        assert text.startswith("{")
        if ended:
            assert isinstance(json.loads(text), dict)


def test_a_schema_cannot_bring_blanks_back() -> None:
    schema = {
        "x-guidance": {"whitespace_flexible": True, "whitespace_pattern": "[ ]+"},
        "type": "array",
        "items": {"const": 1},
    }
    assert all(" " not in text for text, _ in texts(source("json", schema)))


@pytest.mark.parametrize(
    "regex",
    [
        "[0-9]{5}",
        "^[0-9]{5}$",
        "(ab|cd)+",
        r"a\$",
        r"\d\d-\w",
        "colou?r",
        "x/y",
        "é€日",
        "▁x",
        '"quoted"',
        r"a\\",
    ],
)
def test_a_regular_expression_matches_the_whole_text(regex: str) -> None:
    found = [text for text, ended in texts(source("regex", regex)) if ended]
    assert found
    assert all(re.fullmatch(regex, text, re.ASCII) for text in found), found


@pytest.mark.parametrize(
    "choices",
    [
        ["yes", "no"],
        ["yes", "yesterday"],
        [' with "quotes"', "back\\slash", "two\nlines", "tab\t", "日本", "▁mark", "/slash/", "i"],
        ["only"],
        [str(i) for i in range(10_000)],
    ],
    ids=lambda choices: choices[0],
)
def test_exactly_the_choices_come_out(choices: list[str]) -> None:
    found = [
        text
        for text, ended in texts(source("choice", choices), count=60 if len(choices) < 100 else 5)
        if ended
    ]
    assert set(found) <= set(choices)
    assert len(choices) > 8 or set(found) == set(choices)


GBNF = 'root ::= "a" tail\ntail ::= "b" | "(" root ")"'
LARK = 'start: "a" tail\ntail: "b" | "(" start ")"'


@pytest.mark.parametrize("grammar", [GBNF, LARK], ids=["gbnf", "lark"])
def test_a_grammar_in_both_notations(grammar: str) -> None:
    found = {text for text, ended in texts(source("grammar", grammar)) if ended}
    assert {"ab", "a(ab)"} <= found
    for text in found:
        depth = text.count("(")
        assert text == "a(" * depth + "ab" + ")" * depth


# -- where a text ends ---------------------------------------------------------------------------------------


def mask_after(kind: str, value: object, text: str, ends: frozenset[int] = ENDS) -> list[int] | None:
    """What may follow the text; None when it is complete."""
    state = states(kind, value).new_state(ends)
    for token_id in fake_tokenizer().encode_plain(text):
        mask = state.mask()
        assert mask is not None
        assert token_id in allowed(mask)
        state.accept(token_id)
    if state.is_complete:
        return None
    mask = state.mask()
    return None if mask is None else allowed(mask)


def test_end_tokens_come_only_where_the_grammar_may_end() -> None:
    before, after = (
        mask_after("choice", ["yes", "yesterday"], "ye"),
        mask_after("choice", ["yes", "yesterday"], "yes"),
    )
    assert before is not None
    assert after is not None
    assert not ENDS & set(before)
    assert set(after) > ENDS
    assert mask_after("choice", ["yes", "no"], "no") is None
    assert mask_after("regex", "[0-9]{5}", "12345") is None
    assert mask_after("json", {"const": {"a": 1}}, '{"a":1}') is None


def test_the_ends_are_those_of_the_request() -> None:
    """Without any (ignore_eos) a text that may go on goes on, and one that is complete still ends."""
    own = mask_after("regex", "[a-z]+", "ab", frozenset({7}))
    assert own is not None
    assert 7 in own
    assert not ENDS & set(own)
    none = mask_after("regex", "[a-z]+", "ab", frozenset())
    assert none is not None
    assert not {EOS, END_OF_TURN} & set(none)
    assert mask_after("choice", ["yes"], "yes", frozenset()) is None


def test_an_end_token_that_is_text_waits_for_the_end_too() -> None:
    letter = fake_tokenizer().encode_plain("s")[0]
    before = mask_after("regex", "[a-z]{2,4}", "a", frozenset({letter}))
    after = mask_after("regex", "[a-z]{2,4}", "ab", frozenset({letter}))
    assert before is not None
    assert after is not None
    assert letter not in before
    assert letter in after


def test_no_control_token_is_text() -> None:
    tokenizer = fake_tokenizer()
    mask = states("regex", "(?s:.)*").new_state(ENDS).mask()
    assert mask is not None
    assert set(allowed(mask)) & tokenizer.control_token_ids == ENDS
    assert FIRST_BYTE + ord("<") in allowed(mask)


# -- states and vocabularies ---------------------------------------------------------------------------------


def test_states_of_one_grammar_are_their_own() -> None:
    grammar = states("json", SCHEMAS["nested"])
    alone = [walk(grammar.new_state(ENDS), ENDS, seed) for seed in range(4)]
    together = [grammar.new_state(ENDS) for _ in range(4)]
    for state in together:
        mask = state.mask()
        assert mask is not None
        state.accept(allowed(mask)[0])
    assert [walk(grammar.new_state(ENDS), ENDS, seed) for seed in range(4)] == alone


def test_a_mask_is_as_wide_as_the_known_tokens() -> None:
    """A model may have more rows than the tokenizer has tokens."""
    tokenizer = build_tokenizer(vocab_size=512)
    assert tokenizer.num_known_tokens < 512
    grammar = GrammarCompiler(tokenizer).compile_now(source("regex", "(?s:.)*"))
    mask = grammar.new_state(frozenset({1})).mask()
    assert mask is not None
    assert tokenizer.num_known_tokens <= 8 * len(mask) < tokenizer.num_known_tokens + 32
    assert max(allowed(mask)) < tokenizer.num_known_tokens
    assert VOCAB_SIZE == 512


def test_schemas_of_clients_compile() -> None:
    """As pydantic writes them: titles, defaults, discriminated unions, formats."""
    schema: dict[str, Any] = {
        "$defs": {
            "Cat": {
                "properties": {"kind": {"const": "cat", "type": "string"}},
                "required": ["kind"],
                "type": "object",
            },
            "Dog": {
                "properties": {"kind": {"const": "dog", "type": "string"}},
                "required": ["kind"],
                "type": "object",
            },
        },
        "title": "Pet",
        "type": "object",
        "properties": {
            "pet": {
                "discriminator": {
                    "propertyName": "kind",
                    "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"},
                },
                "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            },
            "born": {"type": "string", "format": "date", "title": "Born"},
            "weight": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None},
        },
        "required": ["pet", "born"],
    }
    assert states("json", schema).new_state(ENDS).mask() is not None
