"""What is beyond the queue is refused at once and whole, with a time to come back; what leaves makes room."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.fakes import FakeRunner, fake_engine_factory
from tests.http.live_server import LiveServer, error_of, live_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "a", "max_tokens": 4000, "stream": True}
SHORT = {"prompt": "a", "max_tokens": 1}
RUNNING, QUEUED = 2, 3


def slow_factory(max_num_seqs: int = RUNNING):  # type: ignore[no-untyped-def]
    return fake_engine_factory(FakeRunner(step_delay=0.01), max_model_len=8192, max_num_seqs=max_num_seqs)


@pytest.fixture(scope="module")
def crowded() -> Iterator[LiveServer]:
    with live_server(slow_factory(), max_queued_requests=QUEUED) as live:
        yield live


def assert_refused(response: httpx.Response, status: int = 429) -> None:
    assert response.status_code == status, response.text
    error = error_of(response)
    assert (error["type"], error["code"], error["param"]) == ("server_overloaded", "server_overloaded", None)
    assert 1 <= int(response.headers["retry-after"]) <= 60


def hold(server: LiveServer, stack: ExitStack, count: int) -> None:
    """Occupy so many places until the stack is closed."""
    for _ in range(count):
        stack.enter_context(server.open_request(LONG))
    server.wait_for(lambda: server.metric("requests_running") + server.metric("requests_waiting") == count)


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_beyond_the_queue_is_refused_until_somebody_leaves(crowded: LiveServer, stream: bool) -> None:
    before = crowded.rejections("queue_full")
    with ExitStack() as stack:
        hold(crowded, stack, RUNNING + QUEUED - 1)
        with crowded.open_request(LONG):
            crowded.wait_for(lambda: crowded.metric("requests_waiting") == QUEUED)
            assert_refused(crowded.post(COMPLETIONS, {**SHORT, "stream": stream}))
            assert_refused(
                crowded.post(CHAT, {"messages": [{"role": "user", "content": "a"}], "stream": stream})
            )
            assert crowded.metric("requests_waiting") == QUEUED
        crowded.wait_for(lambda: crowded.metric("requests_waiting") == QUEUED - 1)
        with crowded.open_request(LONG):
            crowded.wait_for(lambda: crowded.metric("requests_waiting") == QUEUED)
    assert crowded.rejections("queue_full") == before + 1
    assert crowded.metric("queue_limit_requests") == QUEUED
    crowded.wait_for(crowded.is_idle)
    crowded.check_alive()


@pytest.mark.parametrize("body", [{"n": 2, "temperature": 1}, {"prompt": ["a", "b"]}])
def test_a_request_is_admitted_whole_or_not_at_all(crowded: LiveServer, body: dict[str, Any]) -> None:
    with ExitStack() as stack:
        hold(crowded, stack, RUNNING + QUEUED - 1)
        assert_refused(crowded.post(COMPLETIONS, {**SHORT, **body}))
        assert crowded.metric("requests_waiting") == QUEUED - 1
        with crowded.open_request(LONG):
            crowded.wait_for(lambda: crowded.metric("requests_waiting") == QUEUED)
    crowded.wait_for(crowded.is_idle)


def test_a_request_larger_than_the_queue_is_served_when_nothing_waits(crowded: LiveServer) -> None:
    large = {"prompt": "a", "max_tokens": 2, "n": 16, "temperature": 1}
    assert len(crowded.complete(**large)["choices"]) == 16
    with ExitStack() as stack:
        hold(crowded, stack, RUNNING + 1)
        assert_refused(crowded.post(COMPLETIONS, large))
    crowded.wait_for(crowded.is_idle)


def test_equal_choices_hold_one_place(crowded: LiveServer) -> None:
    with crowded.open_request({**LONG, "n": 4, "temperature": 0}):
        crowded.wait_for(lambda: crowded.metric("requests_running") == 1)
        assert crowded.app.state.server.admission.num_requests == 1
    crowded.wait_for(crowded.is_idle)


def test_a_refusal_costs_no_encoding(crowded: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    with ExitStack() as stack:
        hold(crowded, stack, RUNNING + QUEUED)
        monkeypatch.setattr(crowded.app.state.server.loaded.tokenizer, "encode", encoded.append)
        assert_refused(crowded.post(COMPLETIONS, SHORT))
    assert encoded == []


def test_places_come_back_however_a_request_ends(crowded: LiveServer) -> None:
    admission = crowded.app.state.server.admission
    for body in (
        SHORT,
        {**SHORT, "n": 3},
        {**SHORT, "stream": True},
        {"prompt": [9] * 9000},
        {"prompt": "a" * 9000},
    ):
        crowded.post(COMPLETIONS, body)
    crowded.post(CHAT, {"messages": [{"role": "assistant", "content": "a" * 9000}]})
    # they leave while they run and, the last two, before anything of them was computed
    with ExitStack() as stack:
        hold(crowded, stack, RUNNING + 2)
    crowded.wait_for(lambda: admission.num_requests == admission.num_tokens == 0)


@pytest.mark.parametrize("prompt", [[9] * 41, "b" * 40, ["b" * 20, "c" * 20]])
def test_prompt_tokens_that_wait_are_limited(prompt: object) -> None:
    with live_server(slow_factory(1), max_queued_prompt_tokens=100) as server, ExitStack() as stack:
        stack.enter_context(server.open_request(LONG))
        server.wait_for(lambda: server.metric("streams_active") == 1)
        stack.enter_context(server.open_request({**LONG, "prompt": [9] * 60}))
        server.wait_for(lambda: server.metric("requests_waiting") == 1)
        assert_refused(server.post(COMPLETIONS, {"prompt": prompt}))
        assert server.rejections("token_budget") == 1
        stack.enter_context(server.open_request({**LONG, "prompt": [9] * 40}))
        server.wait_for(lambda: server.metric("requests_waiting") == 2)


def test_a_prompt_larger_than_the_budget_is_served_when_nothing_waits() -> None:
    with live_server(slow_factory(1), max_queued_prompt_tokens=100) as server:
        assert server.complete(prompt=[9] * 300, max_tokens=1)["usage"]["prompt_tokens"] == 300


def test_the_status_of_refusals_can_be_503() -> None:
    with (
        live_server(slow_factory(1), max_queued_requests=1, overload_status="503") as server,
        ExitStack() as stack,
    ):
        hold(server, stack, 2)
        assert_refused(server.post(COMPLETIONS, SHORT), status=503)


def test_no_limits_when_they_are_off() -> None:
    unlimited = live_server(slow_factory(1), max_queued_requests=0, max_queued_prompt_tokens=0)
    with unlimited as server, ExitStack() as stack:
        hold(server, stack, 40)
        assert server.metric("queue_limit_requests") == 0
