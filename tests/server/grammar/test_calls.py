"""Constrained calls: whatever a model without preferences draws, they parse, name a known function and follow
its schema."""

import json
from typing import Any

import jsonschema
import pytest

from server.grammar.source import CallRules, GrammarError, GrammarSource, check_schema
from server.text.tool_calls.call_parser import CallFormat, CallParser, CallPiece
from server.text.tool_calls.functions import Function
from tests.server.grammar.walks import NESTED, RECURSIVE, texts

FUNCTIONS = (
    Function("nested", None, NESTED, "a"),
    Function("tree", None, RECURSIVE, "b"),
    Function("none", None, None, "c"),
)
SCHEMAS = {function.name: function.schema for function in FUNCTIONS}


def calls_source(several: bool, otherwise: GrammarSource | None = None) -> GrammarSource:
    return GrammarSource("calls", CallRules(FUNCTIONS, several, otherwise), "tools")


def calls_in(text: str) -> list[tuple[str, str]]:
    parser = CallParser(CallFormat(frozenset(SCHEMAS)))
    calls: list[list[str]] = []
    for part in parser.push(text) + parser.flush():
        assert isinstance(part, CallPiece), text
        if part.name is not None:
            calls.append([part.name, ""])
        calls[-1][1] += part.arguments
    return [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("several", [False, True])
def test_calls_follow_their_schemas(several: bool) -> None:
    counts = set()
    for text, ended in texts(calls_source(several), count=15):
        if not ended:
            continue
        calls = calls_in(text)
        counts.add(len(calls))
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert 1 in counts
    assert (max(counts) > 1) == several


def test_the_text_may_be_something_else_instead() -> None:
    other = GrammarSource("regex", "[ab]{3}", "structured_outputs.regex")
    seen = {
        text[0] in "ab" for text, ended in texts(calls_source(True, other), count=40, max_tokens=200) if ended
    }
    assert seen == {True, False}


@pytest.mark.parametrize("parameters", [RECURSIVE, {}, {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}])
def test_arguments_are_objects_wherever_the_schema_says_so(parameters: dict[str, Any]) -> None:
    rules = CallRules((Function("f", None, parameters, "p"),), several=False)
    for text, ended in texts(GrammarSource("calls", rules, "tools"), count=3, max_tokens=60):
        assert text.startswith('{"name":"f","parameters":{')
        if ended:
            assert isinstance(json.loads(text)["parameters"], dict)


@pytest.mark.parametrize(
    "schema",
    [{"type": "object", "properties": {"a": {"type": "string", "format": "odd"}, "b": {"not": {}}}}, {}],
)
def test_what_cannot_be_enforced_is_still_a_schema(schema: dict[str, Any]) -> None:
    check_schema(schema)


@pytest.mark.parametrize(
    "schema", [{"properties": []}, {"properties": {"a": {"type": "objekt"}}}, {"$ref": "http://elsewhere/x"}]
)
def test_what_is_no_schema_is_a_fault(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError):
        check_schema(schema)
