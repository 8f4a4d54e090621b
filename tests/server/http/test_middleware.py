"""Each middleware alone, around an application of a few lines: what it lets through, what it answers itself,
and what it counts."""

import asyncio
import json
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.context import REQUEST_ID_KEY, RequestId
from server.http.host_check import HostMiddleware
from server.http.middleware import ApiKeyMiddleware, Refusals, RequestContextMiddleware, is_sound_request_id
from server.http.unread_body import UnreadBodyMiddleware
from server.observability.metrics import Metrics
from server.settings.settings import Settings


async def says_hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def scope_of(path: str = "/v1/completions", **headers: str) -> Scope:
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": given,
        REQUEST_ID_KEY: RequestId("req-1"),
    }


def asked(app: ASGIApp, scope: Scope, *messages: Message) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer."""
    waiting = [*messages]
    sent: list[Message] = []

    async def receive() -> Message:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    assert [message["more_body"] for message in sent[1:-1] if not message.get("more_body")] == []
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:])


def metrics() -> Metrics:
    return Metrics(Settings())


def rejections(counted: Metrics, reason: str) -> float | None:
    labels = {"endpoint": "completions", "reason": reason}
    return counted.registry.get_sample_value("gemserve_request_rejections_total", labels)


# -- keys


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer one"}, 200),
        ({"authorization": "bearer two"}, 200),
        ({"x_api_key": "two"}, 200),
        ({"authorization": "Bearer three"}, 401),
        ({"authorization": "Basic one"}, 401),
        ({"x_api_key": ""}, 401),
        ({}, 401),
    ],
)
def test_one_of_the_keys_is_needed(headers: dict[str, str], status: int) -> None:
    counted = metrics()
    app = ApiKeyMiddleware(says_hello, ["one", "two"], Refusals(counted))
    assert asked(app, scope_of(**headers))[0] == status
    assert rejections(counted, "unauthorized") == (status == 401)


def test_without_keys_and_on_probes_nothing_is_asked() -> None:
    assert asked(ApiKeyMiddleware(says_hello, [], Refusals(metrics())), scope_of())[0] == 200
    guarded = ApiKeyMiddleware(says_hello, ["one"], Refusals(metrics()))
    assert asked(guarded, scope_of("/health"))[0] == 200
    assert asked(guarded, scope_of("/v1/models"))[0] == 401


def test_a_refusal_has_the_form_of_the_api_that_was_asked() -> None:
    app = ApiKeyMiddleware(says_hello, ["one"], Refusals(metrics()))
    theirs = json.loads(asked(app, scope_of("/v1/messages"))[2])
    ours = json.loads(asked(app, scope_of())[2])
    assert (theirs["type"], theirs["error"]["type"]) == ("error", "authentication_error")
    assert set(ours) == {"error"}


# -- hosts


@pytest.mark.parametrize(
    ("host", "header", "status"),
    [
        ("127.0.0.1", "localhost:8000", 200),
        ("127.0.0.1", "[::1]:8000", 200),
        ("127.0.0.1", "name.example", 200),
        ("127.0.0.1", "evil.example", 403),
        ("0.0.0.0", "evil.example", 200),
    ],
)
def test_a_loopback_server_serves_hosts_of_its_own(host: str, header: str, status: int) -> None:
    counted = metrics()
    app = HostMiddleware(says_hello, host, ["name.example"], Refusals(counted))
    assert asked(app, scope_of(host=header))[0] == status
    assert rejections(counted, "unauthorized") == (status == 403)


# -- the request's id, and the last resort


def test_a_sound_id_is_the_clients_own() -> None:
    app = RequestContextMiddleware(says_hello, metrics())
    assert asked(app, scope_of(x_request_id="mine"))[1]["x-request-id"] == "mine"
    assert asked(app, scope_of(x_request_id="no blanks"))[1]["x-request-id"] != "no blanks"
    assert asked(app, scope_of("/v1/messages", x_request_id="mine"))[1]["request-id"] == "mine"


@pytest.mark.parametrize(("given", "sound"), [("a", True), ("", False), ("a" * 129, False), ("é", False)])
def test_ids_are_short_and_printable(given: str, sound: bool) -> None:
    assert is_sound_request_id(given) == sound


def test_a_fault_of_the_application_is_an_answer() -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("a bug")

    counted = metrics()
    status, _, body = asked(RequestContextMiddleware(fails, counted), scope_of())
    assert (status, json.loads(body)["error"]["code"]) == (500, "internal_error")
    assert b"a bug" not in body
    labels = {"method": "POST", "route": "/v1/completions", "status": "500"}
    assert counted.registry.get_sample_value("gemserve_http_requests_total", labels) == 1


def test_half_an_answer_does_not_look_sound() -> None:
    async def fails_later(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        asked(RequestContextMiddleware(fails_later, metrics()), scope_of())


# -- bodies that were not read


def test_an_answer_waits_at_its_end_for_the_rest_of_the_body() -> None:
    rest: list[Any] = [{"type": "http.request", "body": b"x", "more_body": more} for more in (True, False)]
    status, _, body = asked(UnreadBodyMiddleware(says_hello, 5.0), scope_of(content_length="2"), *rest)
    assert (status, body) == (200, b"hello")


def test_a_client_that_goes_on_sending_is_not_waited_for_forever() -> None:
    sent: list[Message] = []

    async def hangs() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    app = UnreadBodyMiddleware(says_hello, 0.01)
    asyncio.run(app(scope_of(content_length="2"), hangs, send))
    assert [message.get("more_body") for message in sent[1:]] == [True, False]
