"""A request ends when its client would no longer wait: queued work is dropped unstarted, running work is
stopped."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from server.http.deadline import Deadline
from tests.fakes import FakeRunner, fake_engine_factory
from tests.http.live_server import LiveServer, error_of, live_server

COMPLETIONS = "/v1/completions"
HEADER, HINT = "x-request-timeout", "x-stainless-read-timeout"
LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 4000}


@pytest.fixture(scope="module")
def slow_server() -> Iterator[LiveServer]:
    """One sequence at a time, 10 ms a step, prompts of 5 ms a token."""
    runner = FakeRunner(step_delay=0.01, token_delay=0.005)
    with live_server(fake_engine_factory(runner, max_model_len=8192, max_num_seqs=1)) as live:
        yield live


def assert_timed_out(response: Any) -> None:
    assert response.status_code == 408, response.text
    error = error_of(response)
    assert (error["type"], error["code"], error["param"]) == ("timeout_error", "request_timeout", None)
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("headers", "fields"), [({HEADER: "0.25"}, {}), ({}, {"timeout": 0.25})])
def test_queued_work_is_dropped_unstarted(
    slow_server: LiveServer, stream: bool, headers: dict[str, str], fields: dict[str, float]
) -> None:
    before = slow_server.outcomes("timeout")
    with slow_server.open_request(LONG):
        slow_server.wait_for(lambda: slow_server.metric("requests_running") == 1)
        time.sleep(0.05)
        prompt_tokens = slow_server.metric("prompt_tokens_total")
        asked = time.monotonic()
        assert_timed_out(slow_server.post(COMPLETIONS, {**LONG, **fields, "stream": stream}, headers=headers))
        assert 0.2 < time.monotonic() - asked < 15, "the whole answer takes a minute"
        slow_server.wait_for(lambda: slow_server.metric("requests_waiting") == 0)
        assert slow_server.metric("requests_running") == 1
        assert slow_server.metric("prompt_tokens_total") == prompt_tokens
    assert slow_server.outcomes("timeout") == before + 1
    slow_server.wait_for(slow_server.is_idle)


def test_a_prefill_is_stopped(slow_server: LiveServer) -> None:
    assert_timed_out(
        slow_server.post(COMPLETIONS, {"prompt": [9] * 4000, "stream": True}, headers={HEADER: "0.2"})
    )
    slow_server.wait_for(slow_server.is_idle)


def test_an_unstreamed_answer_that_is_not_finished_in_time_is_a_408(slow_server: LiveServer) -> None:
    generated = slow_server.metric("generation_tokens_total")
    assert_timed_out(slow_server.post(COMPLETIONS, LONG, headers={HEADER: "3"}))
    assert slow_server.metric("generation_tokens_total") > generated
    slow_server.wait_for(slow_server.is_idle)


def test_a_stream_ends_with_an_error_event(slow_server: LiveServer) -> None:
    before = slow_server.outcomes("timeout")
    response = slow_server.post(COMPLETIONS, {**LONG, "stream": True, "timeout": 3})
    assert response.status_code == 200
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert json.loads(events[-3][6:])["error"]["code"] == "request_timeout"
    assert len(events) > 5
    assert all('"finish_reason":null' in event for event in events[:-3])
    slow_server.wait_for(slow_server.is_idle)
    assert slow_server.outcomes("timeout") == before + 1


def test_the_earlier_of_header_and_field_holds(slow_server: LiveServer) -> None:
    for header, field in (("0.2", 60), ("60", 0.2)):
        asked = time.monotonic()
        assert_timed_out(slow_server.post(COMPLETIONS, {**LONG, "timeout": field}, headers={HEADER: header}))
        assert time.monotonic() - asked < 15, "the whole answer takes a minute"


def test_an_answer_in_time_is_an_answer(slow_server: LiveServer) -> None:
    response = slow_server.post(
        COMPLETIONS, {"prompt": "a", "max_tokens": 3, "timeout": 20}, headers={HEADER: "20.5"}
    )
    assert response.status_code == 200


def test_the_time_in_the_queue_of_the_encoder_counts(
    slow_server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = slow_server.app.state.server.loaded.tokenizer
    encode = tokenizer.encode

    def slow_encode(text: str) -> list[int]:
        time.sleep(0.4)
        ids: list[int] = encode(text)
        return ids

    monkeypatch.setattr(tokenizer, "encode", slow_encode)
    started = slow_server.metric("prompt_tokens_total")
    assert_timed_out(slow_server.post(COMPLETIONS, LONG, headers={HEADER: "0.1"}))
    assert slow_server.metric("prompt_tokens_total") == started
    assert slow_server.app.state.server.admission.num_requests == 0


@pytest.mark.parametrize("value", ["", "0", "-1", "abc", "nan", "inf", "1e9", "5s"])
def test_a_header_that_is_no_time_is_refused(server: LiveServer, value: str) -> None:
    response = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, headers={HEADER: value})
    assert response.status_code == 400
    assert error_of(response)["param"] == "X-Request-Timeout"


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0, "decimal_below_min_value"),
        (1e9, "decimal_above_max_value"),
        ("5", "invalid_type"),
        (True, "invalid_type"),
    ],
)
def test_a_field_that_is_no_time_is_refused(server: LiveServer, value: object, code: str) -> None:
    error = server.refused(COMPLETIONS, {"prompt": "a", "timeout": value})
    assert (error["code"], error["param"]) == (code, "timeout")


def test_queued_work_that_openai_clients_gave_up_is_dropped(slow_server: LiveServer) -> None:
    with slow_server.open_request(LONG):
        slow_server.wait_for(lambda: slow_server.metric("requests_running") == 1)
        for stream in (True, False):
            assert_timed_out(slow_server.post(COMPLETIONS, {**LONG, "stream": stream}, headers={HINT: "0.2"}))
        assert slow_server.metric("requests_waiting") == 0
    slow_server.wait_for(slow_server.is_idle)


@pytest.mark.parametrize("hint", ["0.1", "", "abc", "-3", "None", "nan"])
def test_the_hint_never_ends_work_that_has_begun(slow_server: LiveServer, hint: str) -> None:
    response = slow_server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 30}, headers={HINT: hint})
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 30


def test_the_hint_does_not_hold_for_streams_that_get_comments_or_have_other_choices() -> None:
    def until(patience: float, stream: bool, num_sequences: int = 1, at: float | None = None) -> float | None:
        return Deadline(at, patience, 100.0).queue_deadline(
            stream=stream, num_sequences=num_sequences, keep_alive_seconds=15.0
        )

    assert until(10, stream=True) == 110
    assert until(15, stream=True) is None
    assert until(10, stream=True, num_sequences=2) is None
    assert until(600, stream=False, num_sequences=2) == 700
    assert until(600, stream=False, at=200.0) == 200
    assert until(15, stream=True, at=200.0) == 200
