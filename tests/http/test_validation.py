"""Hostile and merely odd requests: each is answered as documented, in OpenAI's error shape, and the server is
unharmed."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from server.api.generation.validation import MAX_BODY_BYTES
from tests.fakes import VOCAB_SIZE
from tests.http.live_server import LiveServer, error_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SMALL: dict[str, Any] = {"prompt": "Hello", "max_tokens": 2}
HUGE = 10**30

REFUSED: list[tuple[str, Any, str]] = [
    ("prompt", [], "empty_array"),
    ("prompt", [[]], "empty_array"),
    ("prompt", [VOCAB_SIZE], "invalid_value"),
    ("prompt", [-1], "invalid_value"),
    ("prompt", [9223372036854775808], "invalid_value"),
    ("prompt", [HUGE], "invalid_value"),
    ("prompt", [True], "invalid_type"),
    ("prompt", [1.5], "invalid_type"),
    ("prompt", [2, 2.0], "invalid_type"),
    ("prompt", ["a", 5], "invalid_type"),
    ("prompt", [2, "a"], "invalid_type"),
    ("prompt", [[2, 9], "b"], "invalid_type"),
    ("prompt", [[2], [True]], "invalid_type"),
    ("prompt", None, "missing_required_parameter"),
    ("prompt", {"a": 1}, "invalid_type"),
    ("prompt", 5, "invalid_type"),
    ("prompt", "\ud800", "invalid_value"),
    ("prompt", ["a"] * 100_000, "array_above_max_length"),
    ("temperature", -0.1, "decimal_below_min_value"),
    ("temperature", 2.01, "decimal_above_max_value"),
    ("temperature", "0.7", "invalid_type"),
    ("temperature", True, "invalid_type"),
    ("top_p", 1.1, "decimal_above_max_value"),
    ("top_k", -2, "integer_below_min_value"),
    ("min_p", -1, "decimal_below_min_value"),
    ("seed", 2**63, "integer_above_max_value"),
    ("seed", 2**64, "integer_above_max_value"),
    ("seed", -(2**63) - 1, "integer_below_min_value"),
    ("seed", 1.5, "invalid_type"),
    ("seed", "7", "invalid_type"),
    ("seed", True, "invalid_type"),
    ("stop", "", "empty_string"),
    ("stop", [""], "empty_string"),
    ("stop", ["a", ""], "empty_string"),
    ("stop", [None], "invalid_type"),
    ("stop", ["a", "b", "c", "d", "e"], "array_above_max_length"),
    ("stop", "x" * 100_000, "string_above_max_length"),
    ("stop", [1], "invalid_type"),
    ("max_tokens", -1, "integer_below_min_value"),
    ("max_tokens", "5", "invalid_type"),
    ("max_tokens", 2.0, "invalid_type"),
    ("max_tokens", HUGE, "integer_above_max_value"),
    ("min_tokens", 3, "integer_above_max_value"),
    ("n", 0, "integer_below_min_value"),
    ("n", -1, "integer_below_min_value"),
    ("n", 1.5, "invalid_type"),
    ("n", 129, "integer_above_max_value"),
    ("n", 10**18, "integer_above_max_value"),
    ("best_of", 10**6, "integer_above_max_value"),
    ("best_of", 21, "integer_above_max_value"),
    ("best_of", "2", "invalid_type"),
    ("best_of", 0, "integer_below_min_value"),
    ("logprobs", 21, "integer_above_max_value"),
    ("logprobs", True, "invalid_type"),
    ("allowed_token_ids", [], "empty_array"),
    ("allowed_token_ids", [VOCAB_SIZE], "invalid_value"),
    ("allowed_token_ids", [HUGE], "integer_above_max_value"),
    ("allowed_token_ids", [True], "invalid_type"),
    ("logprob_token_ids", [5], "invalid_value"),
    ("logprob_token_ids", [VOCAB_SIZE], "invalid_value"),
    ("prompt_logprobs", -1, "integer_below_min_value"),
    ("prompt_logprobs", 21, "integer_above_max_value"),
    ("prompt_logprobs", True, "invalid_type"),
    ("return_token_ids", 1, "invalid_type"),
    ("include_stop_str_in_output", "yes", "invalid_type"),
    ("skip_special_tokens", 0, "invalid_type"),
    ("truncate_prompt_tokens", 0, "integer_below_min_value"),
    ("truncate_prompt_tokens", -2, "integer_below_min_value"),
    ("truncate_prompt_tokens", "4", "invalid_type"),
    ("truncate_prompt_tokens", HUGE, "integer_above_max_value"),
    ("continue_final_message", True, "unsupported_parameter"),
    ("logit_bias", {"512": 1}, "invalid_value"),
    ("logit_bias", {"-1": 1}, "invalid_value"),
    ("logit_bias", {"abc": 1}, "invalid_value"),
    ("logit_bias", {"1.5": 1}, "invalid_value"),
    ("logit_bias", {" 7": 1}, "invalid_value"),
    ("logit_bias", {str(i): 1 for i in range(5000)}, "object_above_max_properties"),
    ("cache_salt", "", "empty_string"),
    ("cache_salt", "x" * 257, "string_above_max_length"),
    ("cache_salt", "\ud800", "invalid_value"),
    ("presence_penalty", 2.1, "decimal_above_max_value"),
    ("frequency_penalty", -2.1, "decimal_below_min_value"),
    ("repetition_penalty", 0, "decimal_below_min_value"),
    ("stop_token_ids", [VOCAB_SIZE], "invalid_value"),
    ("stream_options", {}, "invalid_value"),
    ("suffix", "x", "unsupported_parameter"),
    ("tools", [], "unsupported_parameter"),
    ("prompt_embeds", "AAAA", "unsupported_parameter"),
    ("use_beam_search", True, "unsupported_parameter"),
    ("model", 5, "invalid_type"),
]


@pytest.mark.parametrize(("name", "value", "code"), REFUSED, ids=lambda value: repr(value)[:30])
def test_a_wrong_value_is_refused_by_name_and_the_server_goes_on(
    server: LiveServer, name: str, value: Any, code: str
) -> None:
    body = json.dumps({**SMALL, name: value})
    response = server.client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["code"] == code
    assert error["param"].startswith(name)
    server.check_alive()


ACCEPTED: list[tuple[str, Any]] = [
    ("prompt", ""),
    ("prompt", [""]),
    ("prompt", [2]),
    ("prompt", [VOCAB_SIZE - 1]),
    ("temperature", 0),
    ("temperature", 1e-40),
    ("temperature", 1e-3),
    ("temperature", 2),
    ("top_p", 0),
    ("top_k", -1),
    ("top_k", 10**12),
    ("seed", -1),
    ("seed", 2**63 - 1),
    ("stop", []),
    ("stop", "\n"),
    ("max_tokens", 10**12),
    ("max_tokens", 0),
    ("n", 128),
    ("best_of", 1),
    ("best_of", 20),
    ("logprobs", 20),
    ("prompt_logprobs", 20),
    ("logprob_token_ids", []),
    ("allowed_token_ids", [VOCAB_SIZE - 1]),
    ("truncate_prompt_tokens", 1),
    ("truncate_prompt_tokens", 2**63 - 1),
    ("logit_bias", {"511": 100, "1": -100}),
    ("logit_bias", {}),
    ("suffix", ""),
    ("user", "somebody"),
    ("response_format", {"type": "text"}),
]
NULLABLE = (
    "model max_tokens min_tokens temperature top_p top_k min_p seed n stop stop_token_ids ignore_eos stream "
    "stream_options user logprobs echo presence_penalty frequency_penalty repetition_penalty logit_bias "
    "cache_salt best_of suffix metadata allowed_token_ids logprob_token_ids prompt_logprobs return_token_ids "
    "include_stop_str_in_output skip_special_tokens truncate_prompt_tokens"
)


@pytest.mark.parametrize(("name", "value"), ACCEPTED, ids=lambda value: repr(value)[:30])
def test_a_value_at_the_edge_is_accepted(server: LiveServer, name: str, value: Any) -> None:
    assert server.complete(**{**SMALL, name: value})["choices"]


@pytest.mark.parametrize("name", NULLABLE.split())
def test_null_means_the_default(server: LiveServer, name: str) -> None:
    body = {"prompt": "Hello", "temperature": 0, "top_k": 1, "max_tokens": 16}
    expected = server.complete(**body)["choices"]
    assert server.complete(**{**body, name: None})["choices"] == expected


def test_absent_prompt_and_messages_are_named(server: LiveServer) -> None:
    for path, name in ((COMPLETIONS, "prompt"), (CHAT, "messages")):
        error = server.refused(path, {})
        assert (error["code"], error["param"]) == ("missing_required_parameter", name)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b"[]",
        b"null",
        b"5",
        b'"x"',
        b"\xff\xfe",
        b"[" * 200,
        b"[" * 50_000,
        b'{"a":' * 50_000,
        b"1" * 5000,
    ],
    ids=lambda body: repr(body[:8]),
)
def test_a_body_that_is_no_json_object_is_refused(server: LiveServer, body: bytes) -> None:
    response = server.client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "could not parse the JSON body" in error_of(response)["message"]
    server.check_alive()


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["temperature", "n", "model", "unheard_of"])
def test_numbers_that_json_does_not_have_are_refused(
    strict_server: LiveServer, name: str, literal: str
) -> None:
    body = f'{{"prompt": "a", "{name}": {literal}}}'
    response = strict_server.client.post(
        COMPLETIONS, content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    error_of(response)


def test_of_duplicate_keys_the_last_one_counts(server: LiveServer) -> None:
    body = b'{"prompt": "a", "max_tokens": 1, "max_tokens": 3}'
    response = server.client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("content_type", ["text/plain", None, "application/x-www-form-urlencoded"])
def test_another_content_type_is_refused(server: LiveServer, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = server.client.post(COMPLETIONS, content=json.dumps(SMALL).encode(), headers=headers)
    assert response.status_code == 400
    assert "Content-Type" in error_of(response)["message"]


def test_a_body_beyond_the_limit_is_refused_announced_or_not(server: LiveServer) -> None:
    headers = {"content-type": "application/json"}
    response = server.client.post(COMPLETIONS, content=b" " * (MAX_BODY_BYTES + 1), headers=headers)
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"
    chunked = server.client.post(
        COMPLETIONS, content=iter([b" " * (MAX_BODY_BYTES // 2)] * 3), headers=headers
    )
    assert chunked.status_code == 413
    server.check_alive()


def test_prompts_times_choices_are_limited(server: LiveServer) -> None:
    error = server.refused(COMPLETIONS, {"prompt": ["a"] * 64, "n": 64})
    assert (error["param"], error["code"]) == ("n", "integer_above_max_value")


def test_an_unknown_model_is_404(server: LiveServer) -> None:
    error = server.refused(COMPLETIONS, {**SMALL, "model": "x" * 500}, status=404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "The model `xxx" in error["message"]
    assert "does not exist" in error["message"]


def test_unknown_parameters_are_named_in_a_header_or_refused(
    server: LiveServer, strict_server: LiveServer
) -> None:
    body = {**SMALL, "unheard_of": 1, "böse\n": 2, "store": True}
    response = server.post(COMPLETIONS, body)
    assert response.status_code == 200
    assert response.headers["x-gemserve-ignored-parameters"] == "b?se?, store, unheard_of"
    error = strict_server.refused(COMPLETIONS, {**SMALL, "unheard_of": 1})
    assert (error["param"], error["code"]) == ("unheard_of", "unknown_parameter")


def test_unknown_fields_inside_messages_are_named_too(server: LiveServer, strict_server: LiveServer) -> None:
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [part], "id": "m1"}
    body = {"messages": [message], "max_tokens": 1}
    response = server.post(CHAT, body)
    assert response.status_code == 200
    assert (
        response.headers["x-gemserve-ignored-parameters"]
        == "messages[0].content[0].cache_control, messages[0].id"
    )
    error = strict_server.refused(CHAT, body)
    assert error["code"] == "unknown_parameter"
    # What is wrong is named before what is merely unknown.
    assert server.refused(CHAT, {**body, "temperature": 3})["param"] == "temperature"
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "c1"}]}
    assert server.refused(CHAT, {"messages": [message, called]})["param"] == "messages[1].tool_calls[0].type"


def test_wrong_paths_and_methods(server: LiveServer) -> None:
    for method, path in [
        ("GET", "/nope"),
        ("POST", "/v1/x"),
        ("POST", "/v1/completions/"),
        ("GET", "//v1/models"),
        ("GET", "/redoc"),
    ]:
        response = server.client.request(method, server.url + path)
        assert response.status_code == 404
        error = error_of(response)
        assert error["code"] == "unknown_url"
        assert error["message"] == f"Invalid URL ({method} {path})"
    for method, path, allowed in [
        ("GET", COMPLETIONS, "POST"),
        ("DELETE", "/v1/models", "GET"),
        ("POST", "/health", "GET"),
    ]:
        response = server.client.request(method, path)
        assert response.status_code == 405
        assert response.headers["allow"] == allowed
        assert error_of(response)["code"] == "method_not_supported"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("Hi", "messages"),
        ([5], "messages[0]"),
        ([{"role": "critic", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text", "text": "x"}}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "messages[0].content"),
        ([{"role": "assistant", "content": "x"}], "messages[0].role"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_messages_that_make_no_chat_are_refused(server: LiveServer, messages: Any, param: str) -> None:
    error = server.refused(CHAT, {"messages": messages, "max_tokens": 2})
    assert error["param"] == param


@pytest.mark.parametrize(
    "roles", ["user user", "system", "system system user", "system user", "developer user"]
)
def test_roles_that_do_not_alternate_are_merged_or_refused(
    server: LiveServer, strict_server: LiveServer, roles: str
) -> None:
    messages = [{"role": role, "content": "Hi"} for role in roles.split()]
    assert server.chat(messages=messages, max_tokens=2)["choices"][0]["finish_reason"] == "length"
    strict = strict_server.post(CHAT, {"messages": messages, "max_tokens": 2})
    assert strict.status_code == (400 if roles in ("user user", "system", "system system user") else 200)


def test_text_parts_are_the_same_prompt_as_one_string(server: LiveServer) -> None:
    options = {"max_tokens": 8, "temperature": 0}
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]
    by_parts = server.chat(messages=[{"role": "user", "content": parts}], **options)
    by_string = server.chat(messages=[{"role": "user", "content": "Hi there"}], **options)
    assert by_parts["choices"] == by_string["choices"]
    assert by_parts["usage"]["prompt_tokens"] == by_string["usage"]["prompt_tokens"]


def test_an_image_url_is_refused_and_never_fetched(server: LiveServer) -> None:
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)

    with HTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, args=(0.02,))
        thread.start()
        url = f"http://127.0.0.1:{listener.server_port}/x"
        for part in (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "file", "file": {"file_data": url}},
        ):
            error = server.refused(CHAT, {"messages": [{"role": "user", "content": [part]}]})
            assert part["type"] in error["message"]
        listener.shutdown()
        thread.join()
    assert seen == []


def test_chat_works_without_a_template_of_the_model_by_the_built_in_one(server: LiveServer) -> None:
    answer = server.chat(messages=[{"role": "user", "content": "Hi"}], max_tokens=3)
    assert answer["choices"][0]["message"]["role"] == "assistant"


def test_top_logprobs_needs_logprobs(server: LiveServer) -> None:
    error = server.refused(CHAT, {"messages": [{"role": "user", "content": "Hi"}], "top_logprobs": 2})
    assert error["param"] == "top_logprobs"
