"""/v1/responses through the official Python client, unchanged: create, stream and parse, and the turn after a
call."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import FunctionToolParam, Response, ResponseInputParam
from pydantic import BaseModel

from tests.http.live_server import LiveServer
from tests.http.tool_requests import ARGUMENTS, FAILING, PLAIN, RANDOM, SCHEMA, TEXTS, TWO_CALLS

MODEL = "fake-gemma"
TOOLS: list[FunctionToolParam] = [
    {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True},
    {"type": "function", "name": "get_time", "parameters": None, "strict": False},
]


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


@pytest.fixture(scope="module")
def client(scripted: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def validated(response: Response) -> Response:
    """As the client's own model has it, which it does not check by itself."""
    return Response.model_validate(response.to_dict())


def test_text(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL, input="Weather?", instructions="Be brief.", temperature=1, extra_body={"seed": PLAIN}
    )
    assert validated(response).output_text == TEXTS[PLAIN]
    assert response.usage is not None
    assert response._request_id == response.id


def test_a_whole_conversation_with_calls(client: openai.OpenAI) -> None:
    history: ResponseInputParam = [{"role": "user", "content": "Weather?"}]
    first = client.responses.create(
        model=MODEL, input=history, tools=TOOLS, temperature=1, extra_body={"seed": TWO_CALLS}
    )
    history += validated(first).output  # type: ignore[arg-type]
    calls = [item for item in first.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [("get_weather", ARGUMENTS), ("get_time", "{}")]
    history += [{"type": "function_call_output", "call_id": call.call_id, "output": "x"} for call in calls]
    last = client.responses.create(
        model=MODEL, input=history, tools=TOOLS, temperature=1, extra_body={"seed": PLAIN}
    )
    assert validated(last).output_text == TEXTS[PLAIN]


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model=MODEL, input="Weather?", tools=TOOLS, temperature=1, extra_body={"seed": TWO_CALLS}
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == "Let me see."
    )
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in deltas) == ARGUMENTS + "{}"
    assert deltas[-1].snapshot == "{}"
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]


def test_plain_events(client: openai.OpenAI) -> None:
    events = list(
        client.responses.create(
            model=MODEL,
            input="Weather?",
            tools=TOOLS,
            stream=True,
            temperature=1,
            extra_body={"seed": TWO_CALLS},
        )
    )
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "Let me see."
    for event in events:
        type(event).model_validate(event.to_dict())


@pytest.mark.parametrize("stream", [False, True])
def test_the_parsing_helpers_give_the_model(client: openai.OpenAI, stream: bool) -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "input": "Weather?",
        "text_format": Place,
        "extra_body": {"seed": RANDOM},
    }
    if stream:
        with client.responses.stream(**body) as events:
            parsed = events.get_final_response().output_parsed
    else:
        parsed = client.responses.parse(**body).output_parsed
    assert isinstance(parsed, Place)


def test_parsed_arguments(client: openai.OpenAI) -> None:
    tool: Any = {**openai.pydantic_function_tool(Place)["function"], "type": "function"}
    response = client.responses.parse(
        model=MODEL,
        input="Weather?",
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        extra_body={"seed": RANDOM},
    )
    assert response.output[0].type == "function_call"
    assert Place.model_validate(json.loads(response.output[0].arguments))


def test_a_failure_and_an_incomplete_answer_are_seen(client: openai.OpenAI) -> None:
    events = list(
        client.responses.create(
            model=MODEL, input="x", stream=True, temperature=1, extra_body={"seed": FAILING}
        )
    )
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    cut = client.responses.create(
        model=MODEL, input="x", max_output_tokens=3, temperature=1, extra_body={"seed": PLAIN}
    )
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_what_would_need_a_store_is_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Nothing is stored") as refused:
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "unsupported_parameter")
