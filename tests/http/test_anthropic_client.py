"""Anthropic's official Python client, unchanged, against the real server."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import (
    ErrorResponse,
    Message,
    MessageParam,
    RawMessageStreamEvent,
    ToolParam,
    ToolResultBlockParam,
    ToolUseBlock,
)
from pydantic import TypeAdapter

from tests.http.live_server import LiveServer
from tests.http.tool_requests import ARGUMENTS, ONLY_CALL, PLAIN, SCHEMA

MODEL = "fake-gemma"
HELLO: list[MessageParam] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message_and_its_answer_in_the_next_turn(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model=MODEL, max_tokens=6, system="Be brief.", messages=HELLO)
    (block,) = answer.content
    assert block.type == "text"
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 6)
    assert answer._request_id == answer.id
    messages: list[MessageParam] = [
        *HELLO,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": "And?"},
    ]
    again = client.messages.create(model=MODEL, max_tokens=6, messages=messages)
    assert again.stop_reason == "max_tokens"


def test_a_stream_accumulates_to_the_message(client: anthropic.Anthropic) -> None:
    extra = {"temperature": 1, "seed": 7}
    whole = client.messages.create(model=MODEL, max_tokens=30, messages=HELLO, extra_body=extra)
    with client.messages.stream(model=MODEL, max_tokens=30, messages=HELLO, extra_body=extra) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].type == final.content[0].type == "text"
    assert whole.content[0].text == final.content[0].text == text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == 30


def test_raw_answers_have_the_shape_that_the_client_documents(server: LiveServer) -> None:
    body = {"messages": HELLO, "max_tokens": 5, "temperature": 0}
    TypeAdapter(Message).validate_json(server.post("/v1/messages", body).content)
    stream = server.post("/v1/messages", {**body, "stream": True}).text
    found = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    for line in found:
        if line != '{"type":"ping"}':  # is documented, and has no type
            TypeAdapter(RawMessageStreamEvent).validate_json(line)
    error = server.post("/v1/messages", {})
    TypeAdapter(ErrorResponse).validate_json(error.content)


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model=MODEL, max_tokens=30, messages=HELLO, extra_body={"temperature": 0})
    assert whole.content[0].type == "text"
    stop = whole.content[0].text[10:12]
    cut = client.messages.create(
        model=MODEL, max_tokens=30, messages=HELLO, stop_sequences=[stop], extra_body={"temperature": 0}
    )
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)


def test_counting_tokens(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO)
    used = client.messages.create(model=MODEL, max_tokens=1, messages=HELLO).usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


def test_errors_become_the_clients_exceptions(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(model="claude", max_tokens=1, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].input_schema"):
        client.messages.create(
            model=MODEL, max_tokens=1, messages=HELLO, tools=[{"name": "f", "input_schema": {"type": "no"}}]
        )


TOOLS: list[ToolParam] = [
    {"name": "get_weather", "description": "The weather of a city.", "input_schema": SCHEMA}
]


def ask(seed: int) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 300, "tools": TOOLS, "extra_body": {"temperature": 1, "seed": seed}}


def test_a_call_and_its_result_in_the_next_turn(scripted: LiveServer) -> None:
    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0) as client:
        asked: list[MessageParam] = [{"role": "user", "content": "Weather?"}]
        answer = client.messages.create(messages=asked, **ask(ONLY_CALL))
        (call,) = answer.content
        assert call.type == "tool_use"
        assert (answer.stop_reason, call.name, call.input) == (
            "tool_use",
            "get_weather",
            json.loads(ARGUMENTS),
        )
        result: ToolResultBlockParam = {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": "20 degrees",
        }
        turns: list[MessageParam] = [
            *asked,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
        last = client.messages.create(messages=turns, **ask(PLAIN))
        assert last.stop_reason == "end_turn"
        counted = client.messages.count_tokens(model=MODEL, messages=turns, tools=TOOLS)
        assert counted.input_tokens == last.usage.input_tokens + (last.usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize("num_tokens", [300, 45, 38, 20])
def test_a_streamed_call_accumulates_to_the_message(scripted: LiveServer, num_tokens: int) -> None:
    """A call that was cut, too."""
    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0) as client:
        fields = {**ask(ONLY_CALL), "max_tokens": num_tokens}
        whole = client.messages.create(messages=HELLO, **fields)
        with client.messages.stream(messages=HELLO, **fields) as stream:
            final = stream.get_final_message()
    assert final.stop_reason == whole.stop_reason
    calls = [
        [(block.name, block.input) for block in message.content if isinstance(block, ToolUseBlock)]
        for message in (whole, final)
    ]
    assert calls[0] == calls[1]
    assert len(calls[0]) == (num_tokens > 30)
