"""Envelopes around choices: chunks and usage of a stream, the body in one piece, and what a failure says."""

import json
from typing import Any

from server.api.chat.answer import ChatAnswer
from server.api.chat.request import ChatCompletionRequest
from server.api.generation.request import StreamOptions
from server.errors import internal_error
from tests.server.api.events import HEAD, event, plan, usage
from tests.server.text.small_tokenizer import build_tokenizer

BODY = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "hi"}]})


def answer(options: StreamOptions | None = None, **fields: Any) -> ChatAnswer:
    body = BODY.model_copy(update={"stream_options": options})
    return ChatAnswer(build_tokenizer(), plan(**fields), body, HEAD)


def chunks(data: bytes) -> list[Any]:
    events = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


def test_a_stream_begins_with_the_role_and_ends_with_done() -> None:
    said = answer()
    first = chunks(said.chunks(event("Hel", first=True), usage(is_over=False)))
    assert [chunk["choices"][0]["delta"] for chunk in first] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
    ]
    assert {chunk["object"] for chunk in first} == {"chat.completion.chunk"}
    assert "usage" not in first[0]
    last = chunks(said.chunks(event("lo", finish="stop"), usage()))
    assert [chunk["choices"][0]["finish_reason"] for chunk in last] == [None, "stop"]
    assert chunks(said.end(usage())) == ["[DONE]"]


def test_usage_is_null_until_its_own_chunk_unless_it_is_continuous() -> None:
    said = answer(StreamOptions.model_validate({"include_usage": True}))
    assert [chunk["usage"] for chunk in chunks(said.chunks(event("a", first=True), usage()))] == [None, None]
    end = chunks(said.end(usage(prompt=3, completion=2)))
    assert (end[0]["choices"], end[0]["usage"]["total_tokens"], end[1]) == ([], 5, "[DONE]")
    options = {"include_usage": True, "continuous_usage_stats": True}
    continuous = answer(StreamOptions.model_validate(options))
    shown = chunks(continuous.chunks(event("a", first=True), usage(completion=7)))
    assert shown[-1]["usage"]["completion_tokens"] == 7


def test_an_answer_in_one_piece_is_its_pieces_joined() -> None:
    said = answer(n=2)
    for text, index, finish in (("a", 1, None), ("b", 0, "stop"), ("c", 1, "length")):
        said.collect(event(text, index=index, first=finish is None, finish=finish))
    body = said.body(usage())
    assert [choice["message"]["content"] for choice in body["choices"]] == ["b", "ac"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
    assert (body["id"], body["object"], body["model"]) == ("id-1", "chat.completion", "tiny")


def test_a_failure_is_an_error_event_and_the_end() -> None:
    failed = chunks(answer().failure(internal_error(), usage()))
    assert failed[0]["error"]["type"] == "server_error"
    assert failed[1] == "[DONE]"
