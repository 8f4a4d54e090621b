"""A response in one piece and as events, and what it repeats of its request."""

import json
from typing import Any

from server.api.generation.tool_schemas import ToolChoice
from server.api.responses.answer import ResponseAnswer, _shown_choice, _shown_tool, wire_usage
from server.api.responses.request import ResponseRequest
from server.errors import internal_error
from server.text.tool_calls.call_parser import CallFormat, CallPiece
from tests.server.api.events import HEAD, event, plan, usage
from tests.server.api.fakes import FakeEngine, server_state
from tests.server.text.small_tokenizer import build_tokenizer


def test_usage_counts_the_cache_in_its_details() -> None:
    assert wire_usage(usage(prompt=10, completion=4, cached=8)) == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 14,
    }


def test_a_choice_of_tools_is_shown_as_it_was_asked_for() -> None:
    assert _shown_choice(None) == "auto"
    assert _shown_choice(ToolChoice("required")) == "required"
    assert _shown_choice(ToolChoice("required", ("add",), is_named=True)) == {
        "type": "function",
        "name": "add",
    }
    allowed = _shown_choice(ToolChoice("auto", ("add", "sub")))
    assert allowed["type"] == "allowed_tools"
    assert [tool["name"] for tool in allowed["tools"]] == ["add", "sub"]


def test_a_tool_is_shown_with_its_defaults() -> None:
    shown = _shown_tool({"type": "function", "name": "add", "strict": True})
    assert shown == {
        "type": "function",
        "name": "add",
        "description": None,
        "parameters": None,
        "strict": True,
    }


def answer(calls: CallFormat | None = None, **fields: Any) -> ResponseAnswer:
    body = ResponseRequest.model_validate({"input": "hi", **fields})
    return ResponseAnswer(server_state(FakeEngine([])), build_tokenizer(), plan(calls=calls), body, HEAD)


def events(data: bytes) -> list[Any]:
    found = []
    for block in data.decode().split("\n\n"):
        if block:
            name, value = block.split("\n")
            event = json.loads(value.removeprefix("data: "))
            assert event["type"] == name.removeprefix("event: ")
            found.append(event)
    return found


def test_a_stream_of_text_shows_each_item_as_it_is_then() -> None:
    said = answer()
    data = said.chunks(event("Hel", first=True), usage(is_over=False)) + said.chunks(
        event("lo", finish="stop"), usage()
    )
    shown = events(data + said.end(usage()))
    assert [event["type"].removeprefix("response.") for event in shown] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in shown] == list(range(10))
    assert shown[0]["response"]["output"] == []
    assert shown[2]["item"]["content"] == []
    assert shown[3]["part"]["text"] == ""
    assert [event["delta"] for event in shown[4:6]] == ["Hel", "lo"]
    assert shown[8]["item"] == shown[9]["response"]["output"][0]
    assert shown[9]["response"]["status"] == "completed"


def test_calls_are_items_of_their_own() -> None:
    said = answer(CallFormat(frozenset({"add"}), is_forced=False, is_single=False, is_named=False))
    said.collect(event("Well", CallPiece(0, "add", '{"a"'), first=True))
    said.collect(event(CallPiece(0, None, ": 1}"), CallPiece(1, "add", "{}"), finish="tool_calls"))
    response = said.body(usage())
    assert [item["type"] for item in response["output"]] == ["message", "function_call", "function_call"]
    assert [item["status"] for item in response["output"]] == ["completed"] * 3
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    assert [call["arguments"] for call in calls] == ['{"a": 1}', "{}"]


def test_an_answer_that_is_cut_says_so() -> None:
    said = answer()
    said.collect(event("a", first=True, finish="length"))
    response = said.body(usage())
    assert (response["status"], response["completed_at"]) == ("incomplete", None)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


def test_a_failure_keeps_what_was_said() -> None:
    said = answer()
    said.chunks(event("a", first=True), usage(is_over=False))
    (failed,) = events(said.failure(internal_error(), usage()))
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"]["code"] == "server_error"
    assert failed["response"]["output"][0]["status"] == "incomplete"
    assert failed["response"]["output"][0]["content"][0]["text"] == "a"
