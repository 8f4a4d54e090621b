"""A request is found in the log by the id in its body and by the one in its header; answers in one piece say
where time went."""

import logging
import re
from typing import Any

import pytest

from tests.fakes import FakeRunner, fake_engine_factory
from tests.http.live_server import LiveServer, live_server
from tests.http.test_streams import CHAT, COMPLETIONS, MESSAGES

ENDPOINTS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "a", "max_tokens": 2}, "cmpl"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 2}, "chatcmpl"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "prefix"), ENDPOINTS)
def test_header_body_and_log_hold_one_id(
    server: LiveServer,
    caplog: pytest.LogCaptureFixture,
    path: str,
    body: dict[str, Any],
    prefix: str,
    stream: bool,
) -> None:
    with caplog.at_level(logging.INFO, logger="gemserve.request"):
        response = server.post(path, {**body, "stream": stream})
    request_id = response.headers["x-request-id"]
    assert re.fullmatch(prefix + "-[0-9a-f]{32}", request_id)
    assert f'"id":"{request_id}"' in response.text
    (line,) = [record.getMessage() for record in caplog.records if request_id in record.getMessage()]
    assert line.startswith(f"{request_id} request_id={request_id} ")


@pytest.mark.parametrize(("path", "body", "prefix"), ENDPOINTS)
def test_an_id_of_the_client_stands_in_the_header_and_in_the_log_beside_that_of_the_body(
    server: LiveServer, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any], prefix: str
) -> None:
    with caplog.at_level(logging.INFO, logger="gemserve.request"):
        # The same id twice: a client that repeats a request may repeat its id.
        responses = [server.post(path, body, headers={"x-request-id": "job-17"}) for _ in range(2)]
    ids = [response.json()["id"] for response in responses]
    assert len(set(ids)) == 2
    for response, response_id in zip(responses, ids, strict=True):
        assert response.headers["x-request-id"] == "job-17"
        assert re.fullmatch(prefix + "-[0-9a-f]{32}", response_id)
        (line,) = [record.getMessage() for record in caplog.records if response_id in record.getMessage()]
        assert line.startswith(f"{response_id} request_id=job-17 ")


def test_an_error_has_an_id_of_the_same_form(server: LiveServer) -> None:
    refused = server.post(COMPLETIONS, {"prompt": []})
    assert refused.status_code == 400
    assert re.fullmatch("cmpl-[0-9a-f]{32}", refused.headers["x-request-id"])


def phases(response: Any) -> dict[str, float]:
    parts = [part.split(";dur=") for part in response.headers["server-timing"].split(", ")]
    return {name: float(duration) for name, duration in parts}


@pytest.mark.parametrize(("path", "body", "prefix"), ENDPOINTS)
def test_an_answer_in_one_piece_says_where_its_time_went(
    path: str, body: dict[str, Any], prefix: str
) -> None:
    with live_server(fake_engine_factory(FakeRunner(step_delay=0.02), max_num_seqs=1)) as slow:
        response = slow.post(path, {**body, "max_tokens": 4, "temperature": 1, "n": 2})
        times, total = phases(response), int(response.headers["openai-processing-ms"])
        assert list(times) == ["queue", "prefill", "decode"]
        # One choice runs after the other: eight steps, the first of which is the first choice's prefill.
        assert times["prefill"] >= 20
        assert times["decode"] >= 7 * 20
        assert sum(times.values()) <= total + 1  # rounded to whole milliseconds
        assert total <= 1000 * response.elapsed.total_seconds() + 1
        assert "server-timing" not in slow.post(path, {**body, "stream": True}).headers


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"stop": "e", "max_tokens": 40}])
def test_every_way_to_end_has_timings(server: LiveServer, options: dict[str, Any]) -> None:
    times = phases(server.post(COMPLETIONS, {"prompt": "a", "temperature": 0, **options}))
    assert all(value >= 0 for value in times.values())
