"""Schemas of functions are looked at once, by every endpoint that takes them, and what waits for the compiler
does not wait for ever."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import server.grammar.compiler as compiler_module
from server.grammar.source import check_schema
from tests.http.live_server import LiveServer, live_server
from tests.http.test_messages import COUNT, refused
from tests.http.tool_requests import CHAT, MESSAGES, TOOLS, tool

SMALL: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 1}
REGEX = {"guided_regex": "[0-9]{3}"}


def new_tool(number: int) -> dict[str, Any]:
    """One with a schema that was never seen."""
    return tool("f", {"type": "object", "properties": {f"p{number}": {"type": "integer"}}})


# -- looked at once ------------------------------------------------------------------------------------------


def test_a_schema_is_checked_once_by_whatever_endpoint(
    scripted: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[dict[str, Any]] = []

    def check(schema: dict[str, Any]) -> None:
        checked.append(schema)
        check_schema(schema)

    monkeypatch.setattr(compiler_module, "check_schema", check)
    first, second = new_tool(1), new_tool(2)
    for _ in range(3):
        scripted.chat(**SMALL, tools=[first])
    assert checked == [first["function"]["parameters"]]
    scripted.chat(**SMALL, tools=[first, {**second, "function": {**second["function"], "name": "g"}}])
    assert checked[1:] == [second["function"]["parameters"]]
    assert scripted.post("/tokenize", {"messages": MESSAGES, "tools": [second]}).status_code == 200
    messages_tool = {"name": "f", "input_schema": second["function"]["parameters"]}
    assert scripted.post(COUNT, {"messages": MESSAGES, "tools": [messages_tool]}).status_code == 200
    function = {**second["function"], "type": "function"}
    assert (
        scripted.post(
            "/v1/responses", {"input": "a", "max_output_tokens": 1, "tools": [function]}
        ).status_code
        == 200
    )
    assert len(checked) == 2


def test_a_fault_is_found_every_time(server: LiveServer) -> None:
    wrong = [new_tool(3), tool("g", {"type": "object", "properties": {"a": {"type": "no"}}})]
    for _ in range(2):
        assert server.refused(CHAT, {**SMALL, "tools": wrong})["param"] == "tools[1].function.parameters"


# -- the same is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tools",
    [
        [TOOLS[0], TOOLS[0]],
        [tool("f", {"type": "string"})],
        [tool("f", {"type": "objekt"})],
        [tool("f", {"type": "object", "properties": {"a": {"type": "no"}}})],
        [tool("f", {"type": "object", "required": 1})],
        [tool("f g")],
        [],
    ],
    ids=str,
)
def test_tokenize_refuses_the_functions_that_a_chat_refuses(
    server: LiveServer, tools: list[dict[str, Any]]
) -> None:
    errors = [server.refused(path, {"messages": MESSAGES, "tools": tools}) for path in (CHAT, "/tokenize")]
    assert errors[0] == errors[1]


# -- no place to compile -------------------------------------------------------------------------------------


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    """No place is free: all are held by compilations that were left behind."""
    with live_server() as server:
        server.complete(prompt="a", max_tokens=3, **REGEX)
        grammars = server.app.state.server.loaded.grammars
        # An answer may be there before the place of its compilation is given back.
        server.wait_for(lambda: grammars._places._value == compiler_module.COMPILE_THREADS)
        monkeypatch.setattr(grammars, "_places", asyncio.Semaphore(0))
        yield server


def test_a_constraint_that_finds_no_place_is_a_503(
    stuck: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "PLACE_SECONDS", 0.1)
    required = {"tools": TOOLS, "tool_choice": "required"}
    for path, body in (
        ("/v1/completions", {"prompt": "a", **REGEX}),
        (CHAT, {**SMALL, "response_format": {"type": "json_object"}}),
        (CHAT, {**SMALL, "tools": [new_tool(4)]}),
        (CHAT, {**SMALL, **required}),
        ("/tokenize", {"messages": MESSAGES, "tools": [new_tool(4)]}),
    ):
        response = stuck.post(path, body)
        assert response.status_code == 503, response.text
        assert response.json()["error"]["code"] == "compiler_busy"
        assert response.headers["retry-after"] == "5"
    offered = [{"name": "f", "input_schema": new_tool(4)["function"]["parameters"]}]
    response = stuck.post("/v1/messages", {**SMALL, "tools": offered, "tool_choice": {"type": "any"}})
    assert (response.status_code, response.json()["error"]["type"]) == (503, "overloaded_error")
    stuck.check_alive()
    assert stuck.metric("request_rejections_total", endpoint="chat_completions", reason="queue_full") == 3
    stuck.wait_for(stuck.is_idle)


def test_a_deadline_ends_the_wait_for_a_place(stuck: LiveServer) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a", **REGEX}),
        (CHAT, {**SMALL, "tools": [new_tool(5)]}),
    ):
        response = stuck.post(path, {**body, "timeout": 0.2})
        assert response.status_code == 408, response.text
        assert response.json()["error"]["code"] == "request_timeout"
    stuck.check_alive()


def test_who_waited_gets_the_place_that_becomes_free(stuck: LiveServer) -> None:
    grammars = stuck.app.state.server.loaded.grammars
    grammars._places = asyncio.Semaphore(1)
    assert stuck.complete(prompt="a", max_tokens=9, **REGEX)["choices"][0]["finish_reason"] == "stop"
    error = refused(
        stuck,
        {"messages": MESSAGES, "max_tokens": 1, "tools": [{"name": "f", "input_schema": {"type": "no"}}]},
    )
    assert "tools[0].input_schema" in error["message"]
