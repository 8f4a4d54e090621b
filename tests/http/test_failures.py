"""Faults of the engine and of the load, as clients and probes see them: an error in every open answer, never
a silent cut."""

import asyncio
import json
import threading
import time

import httpx
import pytest

from server.api.completions.answer import CompletionAnswer
from server.engine import async_engine
from server.engine.request import EngineHungError
from tests.fakes import BOS, CRASH, HANG, HUNGRY, POISON, FakeRunner, fake_engine_factory
from tests.http.live_server import LiveServer, error_of, live_server

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_fails_before_its_first_token_is_a_500(server: LiveServer, stream: bool) -> None:
    response = server.post(COMPLETIONS, {"prompt": [BOS, POISON], "stream": stream})
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    error = error_of(response)
    assert (error["type"], error["code"], error["param"]) == ("server_error", "internal_error", None)
    server.check_alive()


def test_a_request_that_fails_after_ten_tokens_ends_its_stream_with_an_error_event(
    server: LiveServer,
) -> None:
    failed = server.metric("requests_total", endpoint="completions", stream="true", outcome="error")
    faults = server.metric("numerical_faults_total")
    raw = server.post(COMPLETIONS, {"prompt": [BOS, *[POISON] * 11], "max_tokens": 40, "stream": True}).text
    events = raw.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert set(json.loads(events[-3][6:])["error"]) == {"message", "type", "param", "code"}
    assert all('"finish_reason":null' in event for event in events[:-3])
    assert (
        server.metric("requests_total", endpoint="completions", stream="true", outcome="error") == failed + 1
    )
    assert server.metric("numerical_faults_total") == faults + 1
    server.check_alive()


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_a_lack_of_memory_fails_what_does_not_fit_and_nothing_else_in_the_step(num_tokens: int) -> None:
    with live_server(fake_engine_factory(FakeRunner(step_delay=0.02))) as server:
        expected = server.complete(prompt="a", max_tokens=200, temperature=0)["choices"]
        answers = []
        neighbour = threading.Thread(
            target=lambda: answers.append(server.complete(prompt="a", max_tokens=200, temperature=0))
        )
        neighbour.start()
        server.wait_for(lambda: server.metric("requests_running") == 1)
        refused = server.post(COMPLETIONS, {"prompt": [BOS, *[HUNGRY] * (num_tokens + 1)], "max_tokens": 40})
        neighbour.join()
        assert refused.status_code == 500
        assert "ran out of memory" in error_of(refused)["message"]
        assert answers[0]["choices"] == expected
        assert server.metric("memory_faults_total") >= 2, "the step, and at least one part of it"
        assert server.metric("numerical_faults_total") == 0
        assert (server.outcomes("length"), server.outcomes("error")) == (2, 1)
        server.check_alive()


def test_an_answer_that_cannot_be_written_counts_as_an_error(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: CompletionAnswer, *args: object) -> bytes:
        raise ValueError("injected")

    def failed(stream: str) -> float:
        return server.metric("requests_total", endpoint="completions", stream=stream, outcome="error")

    before = failed("false"), failed("true")
    with monkeypatch.context() as patches:
        patches.setattr(CompletionAnswer, "collect", broken)
        patches.setattr(CompletionAnswer, "chunks", broken)
        response = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 200})
        assert response.status_code == 500
        assert error_of(response)["code"] == "internal_error"
        with pytest.raises(httpx.RemoteProtocolError):  # half an answer does not look sound
            server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 200, "stream": True})
    server.wait_for(lambda: (failed("false"), failed("true")) == (before[0] + 1, before[1] + 1), seconds=60)
    server.wait_for(server.is_idle, seconds=60)
    server.check_alive()


def test_one_failed_choice_ends_the_others_of_its_request_but_no_other_request(server: LiveServer) -> None:
    answers = []
    neighbour = threading.Thread(
        target=lambda: answers.append(server.complete(prompt="a", max_tokens=200, temperature=0))
    )
    neighbour.start()
    raw = server.post(
        COMPLETIONS, {"prompt": [[BOS, *[POISON] * 5], [BOS]], "max_tokens": 400, "stream": True}
    ).text
    neighbour.join()
    assert '"error"' in raw.split("\n\n")[-3]
    assert answers[0]["usage"]["completion_tokens"] == 200
    server.wait_for(server.is_idle)


def test_a_dead_engine_tells_every_client_and_the_probes() -> None:
    deaths: list[BaseException] = []
    with live_server(fake_engine_factory(FakeRunner(step_delay=0.02)), deaths=deaths) as server:
        answers = []
        neighbour = threading.Thread(
            target=lambda: answers.append(
                server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 400, "stream": True}).text
            )
        )
        neighbour.start()
        server.wait_for(lambda: server.metric("requests_running") == 1)
        response = server.post(COMPLETIONS, {"prompt": [BOS, CRASH, CRASH]})
        neighbour.join()
        assert response.status_code == 500
        assert "secret" not in response.text
        assert '"error"' in answers[0].split("\n\n")[-3]
        for path in ("/health", "/health/live", "/health/ready"):
            assert server.client.get(path).status_code == 503
        later = server.post(COMPLETIONS, {"prompt": "a"})
        assert later.status_code == 503
        assert later.headers["retry-after"]
        assert error_of(later)["code"] == "model_not_ready"
        assert server.client.get("/metrics").status_code == 200
        assert server.metric("ready") == 0
        assert [type(error) for error in deaths] == [RuntimeError]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 10])
def test_an_exception_in_the_model_step_is_never_a_silent_cut(num_tokens: int, stream: bool) -> None:
    body = {"prompt": [BOS, *[CRASH] * (num_tokens + 1)], "max_tokens": 40, "stream": stream}
    with live_server(deaths=[]) as server:
        response = server.post(COMPLETIONS, body)
        if stream and num_tokens:
            events = response.text.split("\n\n")
            assert response.status_code == 200
            assert len(events) == num_tokens + 3
            assert events[-2:] == ["data: [DONE]", ""]
            assert json.loads(events[-3][6:])["error"]["code"] == "internal_error"
            assert all('"finish_reason":null' in event for event in events[:-3])
        else:
            assert response.status_code == 500
            assert response.headers["x-should-retry"] == "false"
            assert error_of(response)["code"] == "internal_error"
        assert server.outcomes("error") == 1


@pytest.mark.parametrize("num_tokens", [0, 10])
def test_a_step_that_hangs_ends_the_engine_and_tells_every_client(num_tokens: int) -> None:
    deaths: list[BaseException] = []
    runner = FakeRunner(step_delay=0.02)
    with live_server(fake_engine_factory(runner), deaths=deaths, step_timeout=0.5) as server:
        answers = []
        neighbour = threading.Thread(
            target=lambda: answers.append(
                server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 400, "stream": True}).text
            )
        )
        neighbour.start()
        server.wait_for(lambda: server.metric("requests_running") == 1)
        response = server.post(COMPLETIONS, {"prompt": [BOS, *[HANG] * (num_tokens + 1)], "max_tokens": 40})
        neighbour.join()
        assert response.status_code == 500
        assert '"error"' in answers[0].split("\n\n")[-3]
        for path in ("/health", "/health/ready", "/health/live"):
            assert server.client.get(path).status_code == 503
        assert server.metric("ready") == 0
        assert [type(death) for death in deaths] == [EngineHungError]
        runner.released.set()  # a step that comes back after all changes nothing any more
        time.sleep(0.05)
        assert server.client.get("/health").status_code == 503
        assert server.post(COMPLETIONS, {"prompt": "a"}).status_code == 503
        assert len(deaths) == 1


def test_a_step_that_takes_long_turns_readiness_off_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "STALL_SECONDS", 0.2)
    runner = FakeRunner()
    with live_server(fake_engine_factory(runner), step_timeout=300) as server:
        answers = []
        stuck = threading.Thread(
            target=lambda: answers.append(server.post(COMPLETIONS, {"prompt": [BOS, HANG], "max_tokens": 3}))
        )
        stuck.start()
        server.wait_for(lambda: server.client.get("/health/ready").status_code == 503, seconds=50)
        assert server.client.get("/health/ready").json() == {"status": "stalled"}
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/health/live").status_code == 200
        assert server.metric("ready") == 0
        waiting = threading.Thread(
            target=lambda: answers.append(server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 3}))
        )
        waiting.start()  # it is taken, and waits like the one before
        runner.released.set()
        stuck.join()
        waiting.join()
        assert [answer.status_code for answer in answers] == [200, 200]
        server.wait_for(lambda: server.client.get("/health/ready").status_code == 200)


def test_neither_slow_steps_nor_an_idle_engine_are_a_hung_one() -> None:
    with live_server(fake_engine_factory(FakeRunner(step_delay=0.5)), step_timeout=3) as server:
        time.sleep(3.5)
        assert server.complete(prompt="a", max_tokens=8)["usage"]["completion_tokens"] == 8


def test_while_loading_the_port_answers_and_says_what_it_waits_for() -> None:
    release = threading.Event()
    with live_server(fake_engine_factory(before_load=lambda: assert_set(release)), wait=False) as server:
        server.wait_for(lambda: server.client.get("/health/ready").json().get("phase") == "weights")
        ready = server.client.get("/health/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "loading", "phase": "weights"})
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/health/live").status_code == 200
        assert server.metric("ready") == 0
        refused = server.post(COMPLETIONS, {"prompt": "a"})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert error_of(refused)["code"] == "model_not_ready"
        assert server.client.get("/v1/models").status_code == 503
        assert server.metric("request_rejections_total", endpoint="completions", reason="not_ready") == 1
        release.set()
        server.wait_for(lambda: server.client.get("/health/ready").status_code == 200)
        server.check_alive()
        assert server.metric("ready") == 1


def assert_set(event: threading.Event) -> None:
    assert event.wait(20)


def test_a_failed_load_is_told_to_the_command_line() -> None:
    errors: list[BaseException] = []

    def fail() -> None:
        raise ValueError("model.safetensors is damaged")

    with live_server(fake_engine_factory(before_load=fail), wait=False, deaths=errors) as server:
        server.wait_for(lambda: bool(errors))
        assert str(errors[0]) == "model.safetensors is damaged"
        assert server.client.get("/health/live").status_code == 503


def test_a_server_that_stops_ends_open_streams_with_an_error_event() -> None:
    answers = []
    with live_server(fake_engine_factory(FakeRunner(step_delay=0.01), max_model_len=4096)) as server:
        reader = threading.Thread(
            target=lambda: answers.append(
                server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 4000, "stream": True}).text
            )
        )
        reader.start()
        server.wait_for(lambda: server.metric("requests_running") == 1)
        engine = server.app.state.server.engine
        asyncio.run_coroutine_threadsafe(engine.drain(0.05), engine._loop).result(5)
        reader.join()
        assert json.loads(answers[0].split("\n\n")[-3][6:])["error"]["code"] == "shutting_down"
        refused = server.post(COMPLETIONS, {"prompt": "a"})
        assert (refused.status_code, error_of(refused)["code"]) == (503, "shutting_down")
        assert server.client.get("/health/ready").json() == {"status": "draining"}
        assert server.client.get("/health/live").status_code == 200
