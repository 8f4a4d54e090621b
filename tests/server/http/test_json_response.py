"""JSON as it is sent, errors among it."""

import json

import pytest
from starlette.types import Scope

from server.errors import context_length_exceeded, internal_error, server_overloaded
from server.http.context import REQUEST_ID_KEY, RequestId
from server.http.error_answers import error_answer, is_messages_path, messages_error
from server.http.json_response import encode_json, error_response


def test_text_is_utf8_and_a_lone_surrogate_an_escape() -> None:
    assert encode_json({"a": "é", "b": [1, None]}) == '{"a":"é","b":[1,null]}'.encode()
    assert json.loads(encode_json({"a": "é\ud800"})) == {"a": "é\ud800"}


def test_what_is_no_json_is_not_sent() -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode_json(float("nan"))


def test_an_error_brings_its_headers() -> None:
    response = error_response(server_overloaded(429, "Full.", 7, "queue_full"))
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    assert json.loads(bytes(response.body))["error"]["code"] == "server_overloaded"


@pytest.mark.parametrize(
    ("path", "anthropic"),
    [("/v1/messages", True), ("/v1/messages/count_tokens", True), ("/v1/messagesx", False), ("/", False)],
)
def test_the_path_decides_the_form(path: str, anthropic: bool) -> None:
    assert is_messages_path(path) == anthropic
    scope: Scope = {"path": path, REQUEST_ID_KEY: RequestId("req-1")}
    body = json.loads(bytes(error_answer(scope, internal_error()).body))
    assert (body.get("request_id") == "req-1") == anthropic
    assert ("param" in body["error"]) != anthropic


def test_anthropics_types_follow_the_status() -> None:
    assert messages_error(internal_error())["error"]["type"] == "api_error"
    too_long = context_length_exceeded(8, 9, 1, "messages")
    assert messages_error(too_long)["error"]["type"] == "invalid_request_error"
