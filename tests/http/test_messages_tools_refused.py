"""Tools of the Messages API that are refused: by the names that Anthropic's clients know."""

import json
from typing import Any

import pytest

from tests.http.live_server import LiveServer
from tests.http.test_messages import COUNT, MESSAGES, refused
from tests.http.test_messages_tools import ASKED, OFFERED, create, request
from tests.http.tool_requests import PLAIN


@pytest.fixture
def server(scripted: LiveServer) -> LiveServer:
    return scripted


USED = {"type": "tool_use", "id": "a", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"tools": [{"input_schema": {}}]}, "'tools[0].name'"),
        ({"tools": [{"name": "f"}]}, "'tools[0].input_schema'"),
        ({"tools": [{"name": "f g", "input_schema": {}}]}, "'tools[0].name'"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "'tools[0].input_schema.type'"),
        ({"tools": [{"name": "f", "input_schema": {"type": "objekt"}}]}, "'tools[0].input_schema.type'"),
        (
            {"tools": [OFFERED[0], {"name": "f", "input_schema": {"properties": {"a": {"type": "no"}}}}]},
            "'tools[1].input_schema'",
        ),
        ({"tools": [OFFERED[0], OFFERED[0]]}, "'tools[1].name'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'tools[0].type'"),
        ({"tools": None, "tool_choice": {"type": "any"}}, "'tool_choice'"),
        ({"tool_choice": {"type": "tool", "name": "g"}}, "'tool_choice'"),
        ({"tool_choice": {"type": "tool"}}, "'tool_choice.name'"),
        ({"tool_choice": {"type": "some"}}, "'tool_choice.type'"),
        ({"tool_choice": "any"}, "'tool_choice'"),
        ({"messages": [{"role": "user", "content": [USED]}]}, "'messages[0].content[0].type'"),
        ({"messages": [*ASKED, {"role": "assistant", "content": [USED]}]}, "'messages[1].content[0]'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "'messages[0].content[0].tool_use_id'",
        ),
        (
            {
                "messages": [
                    *ASKED,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]},
                    *ASKED,
                ]
            },
            ".content[0].input'",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}
                        ],
                    }
                ]
            },
            "'messages[0].content[0].content'",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}] * 4096},
                    *ASKED,
                ]
            },
            "'messages'",
        ),
    ],
)
@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_what_is_wrong_is_named(server: LiveServer, fields: dict[str, Any], part: str, path: str) -> None:
    body = {"messages": ASKED, "tools": OFFERED, **fields}
    error = refused(server, body if path == COUNT else {**body, "max_tokens": 3}, path=path)
    assert error["type"] == "invalid_request_error"
    assert part in error["message"]
    assert (
        "function" not in error["message"]
        or "a function named" in error["message"]
        or "two functions" in error["message"]
    )


def test_calls_that_must_be_made_need_schemas_that_can_be_enforced(server: LiveServer) -> None:
    odd = [
        {
            "name": "f",
            "input_schema": {
                "type": "object",
                "properties": {"a": {"type": "string", "format": "shoe-size"}},
            },
        }
    ]
    error = refused(server, request(PLAIN, tools=odd, tool_choice={"type": "any"}))
    assert "'tools[0].input_schema'" in error["message"]
    assert create(server, PLAIN, tools=odd)["stop_reason"] == "end_turn"


@pytest.mark.parametrize("path", [MESSAGES, "/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_half_a_character_in_a_schema_or_an_input_harms_nothing(server: LiveServer, path: str) -> None:
    """JSON can spell lone surrogates, which are no text."""
    function = {"name": "f", "description": None}
    schema = {"type": "object", "title": "\ud800", "properties": {"\udfff": {"type": "integer"}}}
    body: dict[str, Any] = {"messages": ASKED, "max_tokens": 3}
    if path == MESSAGES:
        used = {**USED, "input": {"\ud800": 1}}
        turns = [*ASKED, {"role": "assistant", "content": [used]}, {"role": "user", "content": "a"}]
        body |= {"tools": [{**function, "input_schema": schema}], "messages": turns}
    elif path == "/v1/responses":
        body = {
            "input": "a",
            "tools": [{**function, "type": "function", "parameters": schema}],
            "max_output_tokens": 3,
        }
    else:
        body |= {"tools": [{"type": "function", "function": {**function, "parameters": schema}}]}
    response = server.client.post(
        path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    assert response.status_code in (200, 400), response.text
    server.check_alive()
