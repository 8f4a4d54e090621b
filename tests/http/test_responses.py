"""POST /v1/responses over HTTP: the same prompt and text as the same chat, typed events, items that come back, clear refusals."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.http.live_server import LiveServer, error_of
from tests.http.test_tools import ARGUMENTS, ONLY_CALL, PLAIN, RANDOM, SCHEMA, TEXTS, TWO_CALLS, described
from tests.http.test_tools import TOOLS as CHAT_TOOLS
from tests.scripted import FAILS, TOKENIZER, scripted_server

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
TOOLS = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]
FAILING, FAILING_AT_ONCE = len(TEXTS), len(TEXTS) + 1


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with scripted_server([*TEXTS, f"So far{FAILS}", FAILS]) as live:
        yield live


def respond(server: LiveServer, **body: Any) -> dict[str, Any]:
    response = server.post(RESPONSES, {"input": "Weather?", "temperature": 1, **body})
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def events_of(server: LiveServer, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream whose framing is checked on the raw bytes."""
    response = server.post(RESPONSES, {"input": "Weather?", "temperature": 1, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    blocks = response.content.decode().split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types in their order, runs of deltas as one."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for index, name in enumerate(names) if index == 0 or name != names[index - 1]]


def stable(response: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two answers of the same content."""
    items = [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]]
    usage = {name: value for name, value in response["usage"].items() if name != "input_tokens_details"}
    left = {name: value for name, value in response.items() if name not in ("id", "created_at", "completed_at")}
    return {**left, "output": items, "usage": usage}


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


# -- answers -------------------------------------------------------------------------------------------------------------------


def test_a_text_is_one_message(server: LiveServer) -> None:
    response = respond(server, seed=PLAIN, store=True, metadata={"a": "b"})
    assert response["id"].startswith("resp_")
    assert (response["object"], response["status"], response["error"]) == ("response", "completed", None)
    [item] = response["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": TEXTS[PLAIN], "annotations": [], "logprobs": []}]
    assert response["usage"]["output_tokens"] == len(TOKENIZER.encode_plain(TEXTS[PLAIN])) + 1
    assert response["usage"]["total_tokens"] == response["usage"]["input_tokens"] + response["usage"]["output_tokens"]
    assert (response["store"], response["metadata"], response["tool_choice"], response["tools"]) == (
        False,
        {"a": "b"},
        "auto",
        [],
    )
    assert response["text"]["format"] == {"type": "text"}


def test_answers_are_as_described(server: LiveServer) -> None:
    body = {"input": [{"role": "user", "content": "x"}], "tools": TOOLS, "top_logprobs": 1, "text": {"format": {"type": "text"}}}
    jsonschema.validate(body, described(server, "ResponseRequest"))
    for seed in (TWO_CALLS, PLAIN):
        jsonschema.validate(respond(server, **body, seed=seed), described(server, "ResponseObject"))
    failed = events_of(server, seed=FAILING)[-1]["response"]
    jsonschema.validate(failed, described(server, "ResponseObject"))


def test_headers_are_those_of_the_other_endpoints(server: LiveServer) -> None:
    body = {"input": "Weather?", "seed": PLAIN, "store": True, "metadata": {}, "max_tool_calls": 3, "unheard_of": 1}
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
        [{"role": "user", "content": [{"type": "input_text", "text": "Wea"}, {"type": "input_text", "text": "ther?"}]}],
    ):
        response = respond(server, input=given, instructions="Be brief.", tools=TOOLS, seed=RANDOM, max_output_tokens=20)
        assert response["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]
        assert text_of(response) == expected["choices"][0]["message"]["content"]
    developer = [{"role": "developer", "content": "Be brief."}, user]
    assert (
        respond(server, input=developer, tools=TOOLS, seed=RANDOM, max_output_tokens=20)["usage"]["input_tokens"]
        == (expected["usage"]["prompt_tokens"])
    )


def test_a_second_request_finds_the_first_ones_prompt(server: LiveServer) -> None:
    respond(server, input="a" * 200, seed=PLAIN)
    assert respond(server, input="a" * 200, seed=PLAIN)["usage"]["input_tokens_details"]["cached_tokens"] > 100


def test_a_limit_makes_it_incomplete(server: LiveServer) -> None:
    response = respond(server, seed=PLAIN, max_output_tokens=5)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert text_of(response) == TEXTS[PLAIN][:5]
    assert response["completed_at"] is None
    cut = respond(server, seed=ONLY_CALL, tools=TOOLS, max_output_tokens=50)
    assert cut["output"][0]["status"] == "incomplete"
    assert ARGUMENTS.startswith(cut["output"][0]["arguments"])
    assert respond(server, seed=RANDOM, tools=TOOLS, tool_choice="required", max_output_tokens=3)["output"] == []


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
    streamed = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert streamed == entries[: len(streamed)]
    assert len(streamed) >= len(entries) - 4  # the last run of bytes, and the end


# -- formats and tools ---------------------------------------------------------------------------------------------------------


def test_formats_constrain_the_text(server: LiveServer) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
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
    assert (weather["type"], weather["name"], weather["arguments"]) == ("function_call", "get_weather", ARGUMENTS)
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
    results[0]["output"] = [{"type": "input_text", "text": "result "}, {"type": "input_text", "text": "get_time"}]
    response = respond(server, input=[user, *output, *results, user], tools=TOOLS, seed=PLAIN, instructions="Brief.")
    calls = [
        {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": item["arguments"]}}
        for item in output[1:]
    ]
    messages = [
        {"role": "system", "content": "Brief."},
        user,
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": call["id"], "content": f"result {call['function']['name']}"} for call in calls),
        user,
    ]
    tokenized = server.post("/tokenize", {"messages": messages, "tools": CHAT_TOOLS}).json()
    assert response["usage"]["input_tokens"] == tokenized["count"]


# -- streams -------------------------------------------------------------------------------------------------------------------

MESSAGE_EVENTS = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]
CALL_EVENTS = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
NO_ARGUMENTS = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


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


@pytest.mark.parametrize(("seed", "stream"), [(FAILING_AT_ONCE, True), (FAILING_AT_ONCE, False), (FAILING, False)])
def test_an_error_before_the_first_token_is_an_http_error(server: LiveServer, seed: int, stream: bool) -> None:
    response = server.post(RESPONSES, {"input": "Weather?", "temperature": 1, "seed": seed, "stream": stream})
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert response.headers["x-should-retry"] == "false"


# -- what is refused -----------------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "x"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": []}, "input", "empty_array"),
    ({"input": 5}, "input", "invalid_type"),
    ({"input": "\ud800"}, "input", "invalid_value"),
    ({"input": [5]}, "input[0]", "invalid_type"),
    ({"input": [{}]}, "input[0].role", "missing_required_parameter"),
    ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "invalid_type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
        "missing_required_parameter",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content",
        "unsupported_value",
    ),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "unsupported_value"),
    ({"input": [USER, {"type": "reasoning", "summary": []}]}, "input[1]", "unsupported_value"),
    (
        {"input": [USER, {"type": "function_call", "call_id": "c", "name": "f"}]},
        "input[1].arguments",
        "missing_required_parameter",
    ),
    ({"input": [USER, {"type": "function_call_output", "output": "x"}]}, "input[1].call_id", "missing_required_parameter"),
    ({"input": [USER, {"type": "function_call_output", "call_id": "c"}]}, "input[1].output", "missing_required_parameter"),
    ({"input": [{"role": "assistant", "content": "x"}]}, "input[0].role", "invalid_value"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
    ({"background": True}, "background", "unsupported_parameter"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
    ({"reasoning": {"effort": "high"}}, "reasoning", "unsupported_parameter"),
    ({"messages": [USER]}, "messages", "unsupported_parameter"),
    ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
    ({"n": 2}, "n", "unsupported_parameter"),
    ({"truncation": "auto"}, "truncation", "invalid_value"),
    ({"instructions": 5}, "instructions", "invalid_type"),
    ({"max_output_tokens": -1}, "max_output_tokens", "integer_below_min_value"),
    ({"temperature": 3}, "temperature", "decimal_above_max_value"),
    ({"top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
    ({"include": ["x"]}, "include[0]", "invalid_value"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "missing_required_parameter"),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "objekt"}}}},
        "text.format.schema",
        "invalid_value",
    ),
    ({"text": {"verbosity": "high"}}, "text.verbosity", "invalid_value"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_value"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name", "invalid_value"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"properties": 5}}]}, "tools[0].parameters", "invalid_value"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "invalid_value"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice", "unsupported_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"input": "a" * 2000}, "input", "context_length_exceeded"),
    ({"stop": ["a"] * 5}, "stop", "array_above_max_length"),
    ({"stream": "yes"}, "stream", "invalid_type"),
]


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_is_wrong_is_named(server: LiveServer, fields: dict[str, Any], param: str, code: str) -> None:
    body = json.dumps({"input": "Weather?", "max_output_tokens": 2, **fields})
    response = server.client.post(RESPONSES, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    if code == "unsupported_parameter" and param in ("previous_response_id", "conversation"):
        assert "Nothing is stored" in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(("instructions", "tools", "text", "include", "previous_response_id", "conversation", "background")),
        {"background": False, "truncation": "disabled", "tools": [], "text": {}, "reasoning": {}, "tool_choice": "none"},
        {"text": {"format": {"type": "text"}}, "include": ["reasoning.encrypted_content"], "parallel_tool_calls": True},
        {"stream_options": {"include_obfuscation": False}, "top_k": 5, "seed": 3, "stop": "x", "user": "u"},
        {"input": [{"role": "user", "content": []}]},
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_means_nothing_here_is_taken(server: LiveServer, fields: dict[str, Any]) -> None:
    assert respond(server, max_output_tokens=2, **fields)["status"] == "incomplete"


@pytest.mark.parametrize("body", [b"[]", b"null", b"{", b"", b"\xff\xfe", b'{"input":' * 5000])
def test_a_body_that_is_no_object_is_refused(server: LiveServer, body: bytes) -> None:
    response = server.client.post(RESPONSES, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error_of(response)


def test_other_refusals_are_those_of_the_other_endpoints(server: LiveServer) -> None:
    assert server.refused(RESPONSES, {"input": "x", "model": "other"}, status=404)["code"] == "model_not_found"
    response = server.client.get(RESPONSES)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    late = server.post(RESPONSES, {"input": "Weather?", "timeout": 0.001, "seed": PLAIN})
    assert (late.status_code, error_of(late)["code"]) == (408, "request_timeout")
    assert server.client.get(f"{RESPONSES}/resp_1").status_code == 404
    server.check_alive()


# -- the machinery that all endpoints share ------------------------------------------------------------------------------------


def test_requests_are_counted_under_their_own_name(server: LiveServer) -> None:
    def outcomes(outcome: str, stream: str = "false") -> float:
        return server.metric("requests_total", endpoint="responses", stream=stream, outcome=outcome)

    before = [outcomes("stop"), outcomes("tool_calls"), outcomes("stop", "true"), outcomes("error")]
    rejected = server.metric("request_rejections_total", endpoint="responses", reason="invalid")
    respond(server, seed=PLAIN)
    respond(server, seed=ONLY_CALL, tools=TOOLS)
    events_of(server, seed=PLAIN)
    server.post(RESPONSES, {"input": "Weather?", "temperature": 1, "seed": FAILING_AT_ONCE})
    server.post(RESPONSES, {"input": []})
    after = [outcomes("stop"), outcomes("tool_calls"), outcomes("stop", "true"), outcomes("error")]
    assert after == [count + 1 for count in before]
    assert server.metric("request_rejections_total", endpoint="responses", reason="invalid") == rejected + 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_work_and_needs_the_key(stream: bool) -> None:
    """Case 32, and that the key is asked for."""
    with scripted_server(["a" * 1200], step_delay=0.01, api_key=("secret",)) as slow:
        assert slow.post(RESPONSES, {"input": "x"}).status_code == 401
        slow.client.headers["authorization"] = "Bearer secret"
        payload = json.dumps({"input": "x", "seed": 0, "temperature": 1, "stream": stream}).encode()
        head = (
            "POST /v1/responses HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer secret\r\ncontent-type: application/json\r\n"
        )
        with socket.create_connection(("127.0.0.1", slow.port), timeout=60) as connection:
            connection.sendall(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
            slow.wait_for(lambda: slow.metric("requests_running") == 1, seconds=60)
        slow.wait_for(slow.is_idle, seconds=60)
        labels = {"endpoint": "responses", "stream": str(stream).lower(), "outcome": "client_disconnect"}
        slow.wait_for(lambda: slow.metric("requests_total", **labels) == 1, seconds=60)
        assert slow.metric("generation_tokens_total") < 1200


def test_a_full_queue_refuses_it_with_a_time_to_come_back() -> None:
    settings = {"max_queued_requests": 1, "overload_status": "503"}
    with scripted_server(["a" * 1200], step_delay=0.01, max_num_seqs=1, **settings) as full:
        busy = {"prompt": ["x", "y"], "seed": 0, "temperature": 1, "max_tokens": 1200}
        with full.open_request(busy):
            full.wait_for(lambda: full.metric("requests_waiting") == 1, seconds=60)
            refused = full.post(RESPONSES, {"input": "x", "stream": True})
        assert refused.status_code == 503
        assert error_of(refused)["code"] == "server_overloaded"
        assert int(refused.headers["retry-after"]) >= 1
        assert full.metric("request_rejections_total", endpoint="responses", reason="queue_full") == 1
