"""The choices of a chat: the role first, calls as they come, and the pieces joined are the message."""

from typing import Any

from server.api.chat.answer import ChatAnswer
from server.api.chat.request import ChatCompletionRequest
from server.text.tool_calls.call_parser import CallFormat, CallPiece
from tests.server.api.events import HEAD, event, plan
from tests.server.text.small_tokenizer import build_tokenizer


def form(calls: CallFormat | None = None, **fields: Any) -> ChatAnswer:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    planned = plan(calls=calls)
    return ChatAnswer(build_tokenizer(), planned, ChatCompletionRequest.model_validate(body), HEAD)


def test_nothing_is_said_while_text_is_held_back() -> None:
    assert form().pieces(event(first=True)) == []


def test_an_answer_that_ends_before_it_began_has_empty_text() -> None:
    said = form()
    pieces = said.pieces(event(first=True, finish="stop"))
    assert [piece["delta"] for piece in pieces] == [{"role": "assistant", "content": ""}, {}]
    assert said.merged(0, pieces)["message"]["content"] == ""


def test_calls_are_joined_by_their_index() -> None:
    said = form(CallFormat(frozenset({"add"}), is_forced=True, is_single=False, is_named=False))
    pieces = said.pieces(event(CallPiece(0, "add", '{"a"'), first=True))
    pieces += said.pieces(event(CallPiece(0, None, ": 1}"), CallPiece(1, "add", "{}"), finish="tool_calls"))
    assert pieces[0]["delta"] == {"role": "assistant", "content": None}
    choice = said.merged(0, pieces)
    calls = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None
    assert [call["function"] for call in calls] == [
        {"name": "add", "arguments": '{"a": 1}'},
        {"name": "add", "arguments": "{}"},
    ]
    assert len({call["id"] for call in calls}) == 2
    assert choice["finish_reason"] == "tool_calls"
