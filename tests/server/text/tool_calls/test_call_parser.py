"""Calls are found in a text however it arrives, nothing of them is content, and everything else is, as soon
as it can be."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.tool_calls.call_head import MAX_HEAD_CHARACTERS
from server.text.tool_calls.call_parser import CallFormat, CallParser, CallPiece, Part
from server.text.tool_calls.functions import FunctionCall, calls_text

NAMES = frozenset({"get", "get_x", "put"})
Found = tuple[str, list[tuple[str, str]]]


def found(parts: list[Part]) -> Found:
    content = "".join(part for part in parts if isinstance(part, str))
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallPiece):
            if part.name is not None:
                assert part.index == len(calls)
                calls.append((part.name, ""))
            name, arguments = calls[part.index]
            calls[part.index] = (name, arguments + part.arguments)
    return content, calls


def parse(pieces: list[str], **options: bool) -> Found:
    parser = CallParser(CallFormat(NAMES, **options))
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.push(piece)
    return found(parts + parser.flush())


CASES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("", "", []),
    ("Hello\n\nworld.\n", "Hello\n\nworld.\n", []),
    ('{"name":"get","parameters":{"a":1}}', "", [("get", '{"a":1}')]),
    ('\n {"name": "get_x" , "arguments": { "a": [1, {}] } }\n', "", [("get_x", '{ "a": [1, {}] }')]),
    ('{"name":"get","parameters":{"a":"}\\"{ \\\\"}}', "", [("get", '{"a":"}\\"{ \\\\"}')]),
    ('{"name":"put"}', "", [("put", "{}")]),
    ('{"name":"get","parameters":{}, "id": [{"b": "}"}]}', "", [("get", "{}")]),
    (
        'Sure.\n\n```json\n[{"name":"get","parameters":{}},\n {"name":"put"}]\n```\nDone.',
        "Sure.\nDone.",
        [("get", "{}"), ("put", "{}")],
    ),
    ('```tool_code\n{"name":"get","parameters":{}}\n```', "", [("get", "{}")]),
    (
        '```\n{"name":"get","parameters":{}}\n{"name":"put","parameters":{}}\n```\n',
        "",
        [("get", "{}"), ("put", "{}")],
    ),
    ('{"name":"get","parameters":{}}, {"name":"put","parameters":{}}', "", [("get", "{}"), ("put", "{}")]),
    (
        '[{"name":"get","parameters":{}},{"name":"unknown","parameters":{}}] and more',
        " and more",
        [("get", "{}")],
    ),
    # No calls: another name, another form, not at the start of a line, code in another language.
    ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ('{"name":"getter","parameters":{}}', '{"name":"getter","parameters":{}}', []),
    ('{"name":"get","parameters":"x"}', '{"name":"get","parameters":"x"}', []),
    ('so {"name":"get","parameters":{}}', 'so {"name":"get","parameters":{}}', []),
    ("```python\nprint()\n```", "```python\nprint()\n```", []),
    ("[link](there)\n[", "[link](there)\n[", []),
    ("```", "```", []),
    (" \n\n", " \n\n", []),
    ('{ "', '{ "', []),
    # Cut: what can only be a call is not content.
    ('Hi.\n{"name":"ge', "Hi.", []),
    ('{"name":"get","par', "", []),
    ('{"name":"get","parameters":{"a":"b', "", [("get", '{"a":"b')]),
    ('[{"name":"get","parameters":{}},{"na', "", [("get", "{}")]),
    ('```json\n{"name":"get","parameters":{}}\n``', "", [("get", "{}")]),
]


@pytest.mark.parametrize(("text", "content", "calls"), CASES, ids=range(len(CASES)))
def test_what_is_content_and_what_is_a_call(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse([text]) == (content, calls)
    assert parse(list(text)) == (content, calls)


ENDLESS = 3 * MAX_HEAD_CHARACTERS
CALL = '{"name":"get","parameters":{}}'
LONG_CASES: list[tuple[str, str, list[tuple[str, str]]]] = [
    (" " * ENDLESS + CALL, " " * ENDLESS + CALL, []),
    ("\n" * ENDLESS, "\n" * ENDLESS, []),
    ("\n" * ENDLESS + "Hi.\n" + CALL, "\n" * ENDLESS + "Hi.", [("get", "{}")]),
    ('{"name":' + " " * ENDLESS + CALL, '{"name":' + " " * ENDLESS + CALL, []),
    (CALL + " " * ENDLESS + "Done.", " " * ENDLESS + "Done.", [("get", "{}")]),
    (f"[{CALL}, {' ' * ENDLESS}{CALL}] Done.", " Done.", [("get", "{}")]),
    (f"```\n{CALL}{' ' * ENDLESS}```", " " * ENDLESS + "```", [("get", "{}")]),
]


@pytest.mark.parametrize(("text", "content", "calls"), LONG_CASES, ids=range(len(LONG_CASES)))
def test_a_beginning_without_an_end_is_content(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse([text]) == (content, calls)
    assert parse([text[start : start + 7] for start in range(0, len(text), 7)]) == (content, calls)


def test_no_more_is_held_back_than_the_longest_beginning() -> None:
    """What is held back is read anew with every token."""
    parser = CallParser(CallFormat(NAMES))
    sent = 0
    for count in range(1, ENDLESS // 10):
        sent += sum(len(part) for part in parser.push("\n" * 10) if isinstance(part, str))
        assert 10 * count - sent <= MAX_HEAD_CHARACTERS
    assert sent > 0


FRAGMENTS = [
    '{"name":"get","parameters":{',
    '{"name":"',
    "get",
    '"',
    "}",
    "{",
    "[",
    "]",
    ",",
    "```",
    "json",
    "\n",
    " ",
    "\\",
    "x",
    ":",
]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=20), st.lists(st.integers(0, 60), max_size=8))
def test_it_does_not_matter_how_the_text_is_split(fragments: list[str], cuts: list[int]) -> None:
    text = "".join(fragments)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    assert parse(pieces) == parse([text]) == parse(list(text))


@given(st.text(alphabet='ab {}[]`"\n:,', max_size=60))
def test_text_without_a_call_is_content_as_it_is(text: str) -> None:
    assert parse(list(text)) == (text, [])


def test_only_what_may_become_a_call_is_held_back() -> None:
    parser = CallParser(CallFormat(NAMES))
    assert parser.push("The") == ["The"]
    assert parser.push(" {") == [" {"]
    assert parser.push("\n") == []
    assert parser.push("\n{") == []
    assert parser.push('"nam') == []
    assert parser.push("b") == ['\n\n{"namb']
    assert parser.push("\n[") == []
    assert parser.push("1]") == ["\n[1]"]


def test_arguments_are_handed_on_as_they_come() -> None:
    parser = CallParser(CallFormat(NAMES))
    assert parser.push('{"name":"get","parameters":') == []
    assert parser.push('{"a') == [CallPiece(0, "get", ""), CallPiece(0, None, '{"a')]
    assert parser.push('":1') == [CallPiece(0, None, '":1')]
    assert parser.push("}}") == [CallPiece(0, None, "}")]
    assert parser.flush() == []


def test_a_single_call_ends_the_text() -> None:
    parser = CallParser(CallFormat(NAMES, is_single=True))
    parts = parser.push('[{"name":"get","parameters":{}},{"name":"put","parameters":{}}] more')
    assert parser.is_done
    assert found(parts + parser.push("!") + parser.flush()) == ("", [("get", "{}")])


def test_where_only_calls_are_possible_nothing_is_content() -> None:
    assert parse(["{"], is_forced=True) == ("", [])
    assert parse(['{"name'], is_forced=True) == ("", [])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_calls_of_earlier_turns_are_written_as_they_are_read(count: int) -> None:
    calls = [FunctionCall(f"c{i}", "get", json.dumps({"i": i})) for i in range(count)]
    assert parse([calls_text(calls)]) == ("", [("get", json.dumps({"i": i})) for i in range(count)])
    assert parse([calls_text([FunctionCall("c", "put", "")])]) == ("", [("put", "{}")])
