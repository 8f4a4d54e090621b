"""Anthropic's events and messages: blocks open and close in order, and every end has its reason."""

import json
from typing import Any

import pytest

from server.api.messages.answer import MessageAnswer, call_input, stop_reason, wire_usage
from server.text.tool_calls.call_parser import CallPiece
from tests.server.api.events import HEAD, event, usage


def events(data: bytes) -> list[tuple[str, Any]]:
    found = []
    for block in data.decode().split("\n\n"):
        if block:
            name, value = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(value.removeprefix("data: "))))
    return found


def test_a_stream_of_text_and_a_call() -> None:
    answer = MessageAnswer(HEAD)
    data = answer.chunks(event("Well", first=True), usage(is_over=False))
    data += answer.chunks(event(CallPiece(0, "add", ""), CallPiece(0, None, '{"a"')), usage())
    data += answer.chunks(event(CallPiece(0, None, ": 1}"), finish="tool_calls"), usage())
    data += answer.end(usage())
    names = [name for name, _ in events(data)]
    assert names == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(value["type"] == name for name, value in events(data))
    deltas = [value["delta"] for name, value in events(data) if name == "content_block_delta"]
    assert deltas[0] == {"type": "text_delta", "text": "Well"}
    assert "".join(delta["partial_json"] for delta in deltas[1:]) == '{"a": 1}'


@pytest.mark.parametrize(
    ("finish", "stop_text", "has_calls", "expected"),
    [
        ("length", None, False, ("max_tokens", None)),
        ("stop", "END", False, ("stop_sequence", "END")),
        ("stop", None, False, ("end_turn", None)),
        ("tool_calls", None, True, ("tool_use", None)),
    ],
)
def test_every_end_has_its_reason(
    finish: str, stop_text: str | None, has_calls: bool, expected: tuple[str, str | None]
) -> None:
    end = stop_reason(event(finish=finish, stop_text=stop_text), has_calls=has_calls)
    assert (end["stop_reason"], end["stop_sequence"]) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1, "b": [2', {"a": 1, "b": [2]}),  # cut
        ("[1]", {}),  # no object
        ("no json", {}),
        ('{"a": NaN}', {}),
    ],
)
def test_arguments_as_an_object(arguments: str, expected: dict[str, Any]) -> None:
    assert call_input(arguments) == expected


def test_cached_tokens_are_counted_beside_the_input() -> None:
    assert wire_usage(usage(prompt=10, cached=8)) == {
        "input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 8,
        "output_tokens": 2,
    }
