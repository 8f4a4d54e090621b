"""Tools through the official Python client, unchanged: plain, streamed, and by its helpers that run a whole
turn."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel

from tests.http.live_server import LiveServer
from tests.http.tool_requests import ARGUMENTS, ONLY_CALL, PLAIN, RANDOM, TEXTS, TWO_CALLS

MODEL = "fake-gemma"
USER: ChatCompletionMessageParam = {"role": "user", "content": "Weather?"}


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Paris", "Rome"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]


@pytest.fixture(scope="module")
def client(scripted: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_whole_conversation(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(
        model=MODEL, messages=[USER], tools=TOOLS, seed=TWO_CALLS, temperature=1, max_tokens=300
    )
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    results: list[ChatCompletionMessageParam] = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result of {call.id}"}
        for call in message.tool_calls
    ]
    history: list[ChatCompletionMessageParam] = [USER, message.to_dict(), *results]  # type: ignore[list-item]
    last = client.chat.completions.create(
        model=MODEL, messages=history, tools=TOOLS, seed=PLAIN, temperature=1, max_tokens=300
    )
    assert last.choices[0].message.content == TEXTS[PLAIN]
    assert last.choices[0].message.tool_calls is None
    # As it is, with the nulls that the client's model has.
    dumped: list[ChatCompletionMessageParam] = [USER, message.model_dump(), *results]  # type: ignore[list-item]
    again = client.chat.completions.create(
        model=MODEL, messages=dumped, tools=TOOLS, seed=PLAIN, temperature=1, max_tokens=300
    )
    assert again.usage is not None
    assert last.usage is not None
    assert again.usage.prompt_tokens == last.usage.prompt_tokens


def test_the_streaming_helper_puts_the_calls_together(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [USER],
        "tools": TOOLS,
        "seed": TWO_CALLS,
        "temperature": 1,
        "max_tokens": 300,
    }
    whole = client.chat.completions.create(**body).choices[0]
    with client.chat.completions.stream(
        **{**body, "tools": [{**tool, "function": {**tool["function"]}} for tool in TOOLS]}
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert whole.message.tool_calls is not None
    assert final.message.tool_calls is not None
    assert [call.function.arguments for call in final.message.tool_calls] == [ARGUMENTS, "{}"]
    assert [call.function.name for call in final.message.tool_calls] == [
        call.function.name for call in whole.message.tool_calls
    ]
    assert (final.message.content, final.finish_reason) == (whole.message.content, whole.finish_reason)
    deltas = [
        event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"
    ]
    assert "".join(deltas) == ARGUMENTS + "{}"
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.name for event in done] == ["get_weather", "get_time"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "GetWeather"}}])
def test_the_parsing_helper_gets_arguments_of_its_model(client: openai.OpenAI, choice: str) -> None:
    parsed = client.chat.completions.parse(
        model=MODEL,
        messages=[USER],
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice=choice,  # type: ignore[arg-type]
        parallel_tool_calls=False,
        seed=RANDOM + 2,
        max_tokens=2000,
    )
    calls = parsed.choices[0].message.tool_calls
    assert calls is not None
    assert isinstance(calls[0].function.parsed_arguments, GetWeather)


def test_plain_chunks_of_a_call(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model=MODEL, messages=[USER], tools=TOOLS, seed=ONLY_CALL, temperature=1, max_tokens=300, stream=True
    )
    arguments = ""
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or ():
            assert call.function is not None
            arguments += call.function.arguments or ""
    assert json.loads(arguments) == {"city": "Paris", "days": 2}


def test_faults_are_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=[USER], tool_choice="required")
    assert refused.value.param == "tool_choice"
