"""POST /v1/responses over HTTP: the same prompt and text as the same chat, typed events, items that come
back."""

import json
from typing import Any

import jsonschema
import pytest

from tests.http.live_server import LiveServer, error_of
from tests.http.response_requests import (
    RESPONSES,
    TOOLS,
    events_of,
    kinds,
    respond,
    stable,
    text_of,
)
from tests.http.tool_requests import (
    ARGUMENTS,
    FAILING,
    FAILING_AT_ONCE,
    ONLY_CALL,
    PLAIN,
    RANDOM,
    SCHEMA,
    TEXTS,
    TWO_CALLS,
    described,
)
from tests.http.tool_requests import TOOLS as CHAT_TOOLS
from tests.scripted import TOKENIZER


@pytest.fixture
def server(scripted: LiveServer) -> LiveServer:
    return scripted


# -- answers -------------------------------------------------------------------------------------------------


def test_a_text_is_one_message(server: LiveServer) -> None:
    response = respond(server, seed=PLAIN, store=True, metadata={"a": "b"})
    assert response["id"].startswith("resp_")
    assert (response["object"], response["status"], response["error"]) == ("response", "completed", None)
    [item] = response["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [
        {"type": "output_text", "text": TEXTS[PLAIN], "annotations": [], "logprobs": []}
    ]
    assert response["usage"]["output_tokens"] == len(TOKENIZER.encode_plain(TEXTS[PLAIN])) + 1
    assert (
        response["usage"]["total_tokens"]
        == response["usage"]["input_tokens"] + response["usage"]["output_tokens"]
    )
    assert (response["store"], response["metadata"], response["tool_choice"], response["tools"]) == (
        False,
        {"a": "b"},
        "auto",
        [],
    )
    assert response["text"]["format"] == {"type": "text"}


def test_answers_are_as_described(server: LiveServer) -> None:
    body = {
        "input": [{"role": "user", "content": "x"}],
        "tools": TOOLS,
        "top_logprobs": 1,
        "text": {"format": {"type": "text"}},
    }
    jsonschema.validate(body, described(server, "ResponseRequest"))
    for seed in (TWO_CALLS, PLAIN):
        jsonschema.validate(respond(server, **body, seed=seed), described(server, "ResponseObject"))
    failed = events_of(server, seed=FAILING)[-1]["response"]
    jsonschema.validate(failed, described(server, "ResponseObject"))


def test_headers_are_those_of_the_other_endpoints(server: LiveServer) -> None:
    body = {
        "input": "Weather?",
        "seed": PLAIN,
        "store": True,
        "metadata": {},
        "max_tool_calls": 3,
        "unheard_of": 1,
    }
    response = server.post(RESPONSES, body)
    assert response.headers["x-request-id"] == response.json()["id"]
    assert response.headers["x-gemserve-ignored-parameters"] == "max_tool_calls, metadata, store, unheard_of"
    assert "decode" in response.headers["server-timing"]


def test_input_is_the_prompt_of_the_same_chat(server: LiveServer) -> None:
    user = {"role": "user", "content": "Weather?"}
    messages = [{"role": "system", "content": "Be brief."}, user]
    expected = server.chat(messages=messages, tools=CHAT_TOOLS, seed=RANDOM, temperature=1, max_tokens=20)
    for given in (
        "Weather?",
        [user],
        [{"type": "message", **user}],
        [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "Wea"}, {"type": "input_text", "text": "ther?"}],
            }
        ],
    ):
        response = respond(
            server, input=given, instructions="Be brief.", tools=TOOLS, seed=RANDOM, max_output_tokens=20
        )
        assert response["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]
        assert text_of(response) == expected["choices"][0]["message"]["content"]
    developer = [{"role": "developer", "content": "Be brief."}, user]
    assert (
        respond(server, input=developer, tools=TOOLS, seed=RANDOM, max_output_tokens=20)["usage"][
            "input_tokens"
        ]
        == (expected["usage"]["prompt_tokens"])
    )


def test_a_second_request_finds_the_first_ones_prompt(server: LiveServer) -> None:
    respond(server, input="a" * 200, seed=PLAIN)
    assert (
        respond(server, input="a" * 200, seed=PLAIN)["usage"]["input_tokens_details"]["cached_tokens"] > 100
    )


def test_a_limit_makes_it_incomplete(server: LiveServer) -> None:
    response = respond(server, seed=PLAIN, max_output_tokens=5)
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert response["output"][0]["status"] == "incomplete"
    assert text_of(response) == TEXTS[PLAIN][:5]
    assert response["completed_at"] is None
    cut = respond(server, seed=ONLY_CALL, tools=TOOLS, max_output_tokens=50)
    assert cut["output"][0]["status"] == "incomplete"
    assert ARGUMENTS.startswith(cut["output"][0]["arguments"])
    assert (
        respond(server, seed=RANDOM, tools=TOOLS, tool_choice="required", max_output_tokens=3)["output"] == []
    )


@pytest.mark.parametrize("stream", [False, True])
def test_an_empty_answer_is_an_empty_message(server: LiveServer, stream: bool) -> None:
    body = {"seed": TEXTS.index("")}
    response = events_of(server, **body)[-1]["response"] if stream else respond(server, **body)
    assert response["output"][0]["content"][0]["text"] == ""
    assert response["status"] == "completed"


def test_log_probabilities_of_the_text(server: LiveServer) -> None:
    body: dict[str, Any] = {"seed": PLAIN, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = respond(server, **body)
    entries = response["output"][0]["content"][0]["logprobs"]
    assert len(entries) == response["usage"]["output_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert b"".join(bytes(entry["bytes"]) for entry in entries[:-1]).decode() == TEXTS[PLAIN]
    events = events_of(server, **body)
    assert stable(events[-1]["response"]) == stable(response)
    streamed = [
        entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]
    ]
    assert streamed == entries[: len(streamed)]
    assert len(streamed) >= len(entries) - 4  # the last run of bytes, and the end


# -- formats and tools ---------------------------------------------------------------------------------------


def test_formats_constrain_the_text(server: LiveServer) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    text_format = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    response = respond(server, seed=RANDOM, text={"format": text_format})
    jsonschema.validate(json.loads(text_of(response)), schema)
    assert response["text"]["format"] == text_format
    anything = respond(server, seed=RANDOM, text={"format": {"type": "json_object"}}, max_output_tokens=20)
    assert text_of(anything).startswith("{")


def test_calls_are_items(server: LiveServer) -> None:
    response = respond(server, seed=TWO_CALLS, tools=TOOLS)
    message, weather, time = response["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert (weather["type"], weather["name"], weather["arguments"]) == (
        "function_call",
        "get_weather",
        ARGUMENTS,
    )
    assert (time["name"], time["arguments"], time["status"]) == ("get_time", "{}", "completed")
    assert len({item["id"] for item in response["output"]}) == 3
    assert weather["call_id"] != time["call_id"]
    assert response["status"] == "completed"
    assert response["tools"][0] == {**TOOLS[0], "strict": False}
    single = respond(server, seed=TWO_CALLS, tools=TOOLS, parallel_tool_calls=False)
    assert [item["type"] for item in single["output"]] == ["message", "function_call"]


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
    ],
    ids=["required", "named", "allowed"],
)
def test_a_call_that_must_be_made_follows_its_schema(server: LiveServer, choice: Any) -> None:
    for seed in range(RANDOM, RANDOM + 3):
        response = respond(server, seed=seed, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        [item] = response["output"]
        assert response["tool_choice"] == choice
        jsonschema.validate(json.loads(item["arguments"]), SCHEMA if item["name"] == "get_weather" else {})
        assert choice == "required" or item["name"] == "get_weather"


def test_items_of_the_answer_come_back_as_input(server: LiveServer) -> None:
    """The prompt of the second turn is that of the same chat."""
    user = {"role": "user", "content": "Weather?"}
    output = respond(server, seed=TWO_CALLS, tools=TOOLS)["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": f"result {item['name']}"}
        for item in reversed(output)
        if item["type"] == "function_call"
    ]
    results[0]["output"] = [
        {"type": "input_text", "text": "result "},
        {"type": "input_text", "text": "get_time"},
    ]
    response = respond(
        server, input=[user, *output, *results, user], tools=TOOLS, seed=PLAIN, instructions="Brief."
    )
    calls = [
        {
            "id": item["call_id"],
            "type": "function",
            "function": {"name": item["name"], "arguments": item["arguments"]},
        }
        for item in output[1:]
    ]
    messages = [
        {"role": "system", "content": "Brief."},
        user,
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        *(
            {"role": "tool", "tool_call_id": call["id"], "content": f"result {call['function']['name']}"}
            for call in calls
        ),
        user,
    ]
    tokenized = server.post("/tokenize", {"messages": messages, "tools": CHAT_TOOLS}).json()
    assert response["usage"]["input_tokens"] == tokenized["count"]


# -- streams -------------------------------------------------------------------------------------------------

MESSAGE_EVENTS = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]
CALL_EVENTS = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]
NO_ARGUMENTS = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"seed": PLAIN}, [*MESSAGE_EVENTS, "completed"]),
        ({"seed": PLAIN, "max_output_tokens": 3}, [*MESSAGE_EVENTS, "incomplete"]),
        ({"seed": PLAIN, "tools": TOOLS}, [*MESSAGE_EVENTS, "completed"]),
        ({"seed": ONLY_CALL, "tools": TOOLS}, [*CALL_EVENTS, "completed"]),
        ({"seed": TWO_CALLS, "tools": TOOLS}, [*MESSAGE_EVENTS, *CALL_EVENTS, *NO_ARGUMENTS, "completed"]),
        ({"seed": ONLY_CALL, "tools": TOOLS, "max_output_tokens": 50}, [*CALL_EVENTS, "incomplete"]),
    ],
)
def test_the_sequence_of_events(server: LiveServer, fields: dict[str, Any], expected: list[str]) -> None:
    events = events_of(server, **fields)
    assert kinds(events) == ["created", "in_progress", *expected]
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert {event["response"]["id"] for event in events if "response" in event} == {first["id"]}
    assert stable(last) == stable(respond(server, **fields))
    # What is said of an item while it grows is what it comes to.
    for index, item in enumerate(last["output"]):
        own = [event for event in events if event.get("output_index") == index]
        assert own[0]["item"]["id"] == own[-1]["item"]["id"] == item["id"]
        assert own[-1]["item"] == item
        assert all(event["item_id"] == item["id"] for event in own[1:-1])
        said = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert said == (item["content"][0]["text"] if item["type"] == "message" else item["arguments"])
        done = next(event for event in own if event["type"].endswith(("text.done", "arguments.done")))
        assert said == done.get("text", done.get("arguments"))


def test_an_error_after_the_first_token_is_a_failed_response(server: LiveServer) -> None:
    """Case 31: never a silent end."""
    events = events_of(server, seed=FAILING)
    assert kinds(events)[-1] == "failed"
    response = events[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert "not finite" in response["error"]["message"]
    assert text_of(response) == "So far"
    assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("seed", "stream"), [(FAILING_AT_ONCE, True), (FAILING_AT_ONCE, False), (FAILING, False)]
)
def test_an_error_before_the_first_token_is_an_http_error(
    server: LiveServer, seed: int, stream: bool
) -> None:
    response = server.post(RESPONSES, {"input": "Weather?", "temperature": 1, "seed": seed, "stream": stream})
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert response.headers["x-should-retry"] == "false"
