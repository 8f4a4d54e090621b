"""What a request constrains its text to, as values, and its translation into one grammar in llguidance's JSON
form.

Everything here is cheap and bounded by the size limits. Whether the grammar makes sense is found by compiling
it. JSON is compact: no blanks outside strings, so that no model can fill its answer with them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from server.text.tool_calls.functions import Function, call_head

MAX_SCHEMA_CHARACTERS = 256 * 1024
MAX_REGEX_CHARACTERS = 16 * 1024
MAX_GRAMMAR_CHARACTERS = 64 * 1024
MAX_LISTED_CHOICES = 10_000
MAX_CHOICE_CHARACTERS = 256 * 1024  # of all choices together
# The compiler descends by recursion; what it takes at this depth is far below its stack.
MAX_BRACKET_DEPTH = 100
# Of one answer: a model without an end in sight has one.
MAX_CALLS = 64

# Wins over an "x-guidance" of the schema, as do the other ones below.
_COMPACT_JSON: Any = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}

# For schemas that the model is shown and its arguments need not follow: only what is no schema at all is a
# fault.
_SHOWN_JSON: Any = {"coerce_one_of": True, "lenient": True}


class GrammarError(Exception):
    """A constraint that can't be compiled. The text says why and is fit to be shown behind the name of the
    field."""


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """One constraint as the client gave it: a schema as a dict, choices as a tuple, calls as CallRules, the
    others as text."""

    kind: Literal["json", "regex", "choice", "grammar", "calls"]
    value: Any
    param: str  # the field it came from

    def translate(self) -> str:
        """The grammar in llguidance's JSON form. Raises GrammarError."""
        match self.kind:
            case "json":
                return _from_schema(self.value)
            case "regex":
                return _from_regex(self.value)
            case "choice":
                return _from_choices(self.value)
            case "grammar":
                return _from_grammar(self.value)
            case "calls":
                return _from_calls(self.value)


@dataclass(frozen=True, slots=True)
class CallRules:
    """Calls of functions, in the form of ``text.functions``, with arguments that follow their schemas: one,
    or with ``several`` also a list of them. ``otherwise`` is what the text may be instead; without it there
    must be a call."""

    functions: tuple[Function, ...]
    several: bool
    otherwise: GrammarSource | None = None


def check_schema(schema: dict[str, Any]) -> None:
    """Raises GrammarError for what is no JSON schema. Keywords that could not be enforced are no fault."""
    grammar = _schema_grammar(schema, _SHOWN_JSON)
    is_faulty, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    if is_faulty:
        raise GrammarError(str(messages[0])[:300])


def _from_schema(schema: dict[str, Any]) -> str:
    return _schema_grammar(schema, _COMPACT_JSON)


def _schema_grammar(schema: dict[str, Any], options: Any) -> str:
    try:
        text = json.dumps(schema)
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None
    _check_size(len(text), MAX_SCHEMA_CHARACTERS, "schema")
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options)
    except ValueError as error:
        raise GrammarError(f"the schema is not readable: {error}") from None


def _from_regex(regex: str) -> str:
    _check_size(len(regex), MAX_REGEX_CHARACTERS, "regular expression")
    _check_repeats(regex)
    # The whole text is matched anyway, and the compiler knows no anchors.
    body = regex.removeprefix("^")
    backslashes = len(body[:-1]) - len(body[:-1].rstrip("\\"))
    if body.endswith("$") and backslashes % 2 == 0:
        body = body[:-1]
    if not body:
        raise GrammarError("it matches only the empty text")
    return _lark(f"start: /{llguidance.regex_to_lark(body, 'dws')}/")


def _check_repeats(regex: str) -> None:
    """A repeat of a repeat is a slip in every dialect, though the compiler reads it as some other
    expression."""
    in_class = False
    position = 0
    while position < len(regex):
        character = regex[position]
        if character == "\\":
            position += 2
            continue
        if in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "*+?" and regex[position + 1 : position + 2] in ("*", "+"):
            raise GrammarError(f"nothing to repeat at position {position + 1} of the regular expression")
        position += 1


def _from_choices(choices: tuple[str, ...]) -> str:
    _check_size(sum(map(len, choices)), MAX_CHOICE_CHARACTERS, "list of choices")
    return _lark(
        "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    )


def _from_grammar(grammar: str) -> str:
    _check_size(len(grammar), MAX_GRAMMAR_CHARACTERS, "grammar")
    if not grammar.strip():
        raise GrammarError("the grammar is empty")
    try:
        lark = any_to_lark(grammar)
    except Exception as error:  # the converter has no exceptions of its own
        raise GrammarError(f"the grammar is not readable: {error}") from None
    depth = deepest = 0
    for character in lark:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    if deepest > MAX_BRACKET_DEPTH:
        raise GrammarError(f"its brackets are nested more than {MAX_BRACKET_DEPTH} deep")
    return _lark(lark)


def _from_calls(rules: CallRules) -> str:
    """Each function's arguments, and what may stand instead of calls, are grammars of their own."""
    parts: list[Any] = []
    calls = []
    for index, function in enumerate(rules.functions):
        parts.append({**_only_part(_from_schema(function.schema)), "name": f"arguments{index}"})
        calls.append(f'{json.dumps(call_head(function.name))} @arguments{index} "}}"')
    starts = ["call"]
    if rules.several:
        starts.append(f'"[" call ("," call){{0,{MAX_CALLS - 1}}} "]"')
    if rules.otherwise is not None:
        parts.append({**_only_part(rules.otherwise.translate()), "name": "otherwise"})
        starts.append("@otherwise")
    lark = f"start: {' | '.join(starts)}\ncall: {' | '.join(calls)}\n"
    return json.dumps({"grammars": [{"name": "calls", "lark_grammar": lark}, *parts]})


def _only_part(grammar: str) -> dict[str, Any]:
    parts: Sequence[dict[str, Any]] = json.loads(grammar)["grammars"]
    assert len(parts) == 1
    return parts[0]


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _check_size(size: int, limit: int, what: str) -> None:
    if size > limit:
        raise GrammarError(f"the {what} has {size} characters, more than the limit of {limit}")
