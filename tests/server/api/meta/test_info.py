"""What the server says of itself, in every phase of its life."""

import asyncio
import json
from collections.abc import Callable, Coroutine

import pytest
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.api.meta.info import create_router, model_card
from server.state import ServerState
from tests.server.api.fakes import FakeEngine, post, server_state


def asked(router: APIRouter, path: str, state: ServerState) -> tuple[int, dict[str, object]]:
    route = next(found for found in router.routes if isinstance(found, Route) and found.path == path)
    endpoint: Callable[[Request], Coroutine[None, None, Response]] = route.endpoint
    response = asyncio.run(endpoint(post(state, path, {})))
    return response.status_code, json.loads(bytes(response.body))


def loaded() -> ServerState:
    return server_state(FakeEngine([]))


def stalled() -> ServerState:
    engine = FakeEngine([])
    engine.is_stalled = True
    return server_state(engine)


def dead() -> ServerState:
    engine = FakeEngine([])
    engine.is_dead = True
    return server_state(engine)


def draining() -> ServerState:
    state = loaded()
    state.is_stopping = True
    return state


@pytest.mark.parametrize(
    ("state", "status", "ready", "live"),
    [
        (loaded, "ok", 200, 200),
        (server_state, "loading", 503, 200),
        (stalled, "stalled", 503, 200),
        (draining, "draining", 503, 200),
        (dead, "dead", 503, 503),
    ],
)
def test_health(state: Callable[[], ServerState], status: str, ready: int, live: int) -> None:
    router = create_router()
    for path, expected in (("/health", ready), ("/health/ready", ready), ("/health/live", live)):
        code, body = asked(router, path, state())
        assert (code, body["status"]) == (expected, status)
        assert ("phase" in body) == (status == "loading")


def test_a_models_card_says_what_holds_without_settings() -> None:
    state = loaded()
    card = model_card(state, "other")
    assert (card["id"], card["root"], card["max_model_len"]) == ("other", "tiny", 64)
    assert card["default_sampling"] == {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    assert state.loaded is not None
    state.loaded.default_sampling["top_k"] = 64
    assert model_card(state, "tiny")["default_sampling"]["top_k"] == 64


def test_metrics_may_have_a_listener_of_their_own() -> None:
    def paths(router: APIRouter) -> set[str]:
        return {route.path for route in router.routes if isinstance(route, Route)}

    assert paths(create_router()) - paths(create_router(serves_metrics=False)) == {"/metrics"}
