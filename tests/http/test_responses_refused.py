"""POST /v1/responses over HTTP: what is refused and what is taken without effect, and the machinery that all
endpoints share."""

import json
import socket
from typing import Any

import pytest

from server.api.generation import endpoint
from tests.http.live_server import LiveServer, error_of
from tests.http.response_requests import RESPONSES, TOOLS, events_of, respond
from tests.http.tool_requests import FAILING_AT_ONCE, ONLY_CALL, PLAIN
from tests.scripted import FAILS, scripted_server


@pytest.fixture
def server(scripted: LiveServer) -> LiveServer:
    return scripted


# -- what is refused -----------------------------------------------------------------------------------------

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
    (
        {"input": [USER, {"type": "function_call_output", "output": "x"}]},
        "input[1].call_id",
        "missing_required_parameter",
    ),
    (
        {"input": [USER, {"type": "function_call_output", "call_id": "c"}]},
        "input[1].output",
        "missing_required_parameter",
    ),
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
    (
        {"text": {"format": {"type": "json_schema", "name": "a"}}},
        "text.format.schema",
        "missing_required_parameter",
    ),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "objekt"}}}},
        "text.format.schema",
        "invalid_value",
    ),
    ({"text": {"verbosity": "high"}}, "text.verbosity", "invalid_value"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_value"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name", "invalid_value"),
    (
        {"tools": [{"type": "function", "name": "f", "parameters": {"properties": 5}}]},
        "tools[0].parameters",
        "invalid_value",
    ),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "invalid_value"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice", "unsupported_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"input": "a" * 2000}, "input", "context_length_exceeded"),
    ({"stop": ["a"] * 5}, "stop", "array_above_max_length"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"metadata": {"a": [float("inf")]}}, "metadata", "invalid_value"),
    (
        {"tools": [{"type": "function", "name": "f", "parameters": {"const": float("inf")}}]},
        "tools[0].parameters",
        "invalid_value",
    ),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options", "invalid_value"),
    (
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": 1}},
        "stream_options.include_obfuscation",
        "invalid_type",
    ),
]


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_is_wrong_is_named(server: LiveServer, fields: dict[str, Any], param: str, code: str) -> None:
    body = json.dumps({"input": "Weather?", "max_output_tokens": 2, **fields}).replace("Infinity", "1e999")
    response = server.client.post(RESPONSES, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    if code == "unsupported_parameter" and param in ("previous_response_id", "conversation"):
        assert "Nothing is stored" in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(
            ("instructions", "tools", "text", "include", "previous_response_id", "conversation", "background")
        ),
        {
            "background": False,
            "truncation": "disabled",
            "tools": [],
            "text": {},
            "reasoning": {},
            "tool_choice": "none",
        },
        {
            "text": {"format": {"type": "text"}},
            "include": ["reasoning.encrypted_content"],
            "parallel_tool_calls": True,
        },
        {"stream_options": None, "top_k": 5, "seed": 3, "stop": "x", "user": "u"},
        {"input": [{"role": "user", "content": []}]},
        {"input": [{"type": None, "role": "user", "content": "x", "status": None, "phase": None}]},
        {"tool_choice": "auto"},
        {"tool_choice": "auto", "tools": [], "parallel_tool_calls": False},
        {"metadata": {"\ud800": "\udfff"}},
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_means_nothing_here_is_taken(server: LiveServer, fields: dict[str, Any]) -> None:
    body = json.dumps({"input": "Weather?", "max_output_tokens": 2, **fields})
    response = server.client.post(RESPONSES, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    assert response.json()["status"] == "incomplete"
    assert response.json()["metadata"] == fields.get("metadata", {})


@pytest.mark.parametrize("body", [b"[]", b"null", b"{", b"", b"\xff\xfe", b'{"input":' * 5000])
def test_a_body_that_is_no_object_is_refused(server: LiveServer, body: bytes) -> None:
    response = server.client.post(RESPONSES, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error_of(response)


def test_other_refusals_are_those_of_the_other_endpoints(server: LiveServer) -> None:
    assert (
        server.refused(RESPONSES, {"input": "x", "model": "other"}, status=404)["code"] == "model_not_found"
    )
    streamed = server.post(RESPONSES, {"input": "x", "stream": True, "temperature": 3})
    assert (streamed.status_code, streamed.headers["content-type"]) == (400, "application/json")
    response = server.client.get(RESPONSES)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    late = server.post(RESPONSES, {"input": "Weather?", "timeout": 0.001, "seed": PLAIN})
    assert (late.status_code, error_of(late)["code"]) == (408, "request_timeout")
    assert server.client.get(f"{RESPONSES}/resp_1").status_code == 404
    server.check_alive()


# -- the machinery that all endpoints share ------------------------------------------------------------------


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


def test_a_stream_that_began_idle_and_fails_has_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "KEEP_ALIVE_SECONDS", 0.05)
    with scripted_server([FAILS], step_delay=2) as slow:
        raw = slow.post(RESPONSES, {"input": "x", "seed": 0, "temperature": 1, "stream": True}).text
    assert raw.startswith(": keep-alive\n\n")
    names = [line.removeprefix("event: ") for line in raw.splitlines() if line.startswith("event: ")]
    assert names == ["response.created", "response.in_progress", "response.failed"]


def test_options_of_a_stream_change_nothing(server: LiveServer) -> None:
    """Case 29: usage is in the last event, whatever is asked for."""
    for options in (None, {}, {"include_obfuscation": True}):
        last = events_of(server, seed=PLAIN, stream_options=options)[-1]
        assert last["response"]["usage"]["output_tokens"] > 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_work_and_needs_the_key(stream: bool) -> None:
    """Case 32, and that the key is asked for."""
    with scripted_server(["a" * 1200], step_delay=0.01, api_key=("secret",)) as slow:
        assert slow.post(RESPONSES, {"input": "x"}).status_code == 401
        slow.client.headers["authorization"] = "Bearer secret"
        payload = json.dumps({"input": "x", "seed": 0, "temperature": 1, "stream": stream}).encode()
        head = (
            "POST /v1/responses HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer secret\r\n"
            "content-type: application/json\r\n"
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
