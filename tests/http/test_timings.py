"""``return_timings``: where the time of a request went, in the body."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes import FakeRunner, fake_engine_factory
from tests.http.live_server import LiveServer, live_server

ENDPOINTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
]
FIELDS = {"queue_ms", "prefill_ms", "decode_ms", "prefill_tokens_per_second", "decode_tokens_per_second"}


@pytest.fixture(scope="module")
def slow() -> Iterator[LiveServer]:
    with live_server(fake_engine_factory(FakeRunner(step_delay=0.01)), prefix_caching=False) as live:
        yield live


def chunks(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = server.post(path, {**body, "stream": True}).text.split("\n\n")[:-2]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
def test_phases_and_rates_of_an_answer_in_one_piece(
    slow: LiveServer, path: str, body: dict[str, Any]
) -> None:
    answer = slow.post(path, {**body, "max_tokens": 5, "return_timings": True})
    timings = answer.json()["timings"]
    assert set(timings) == FIELDS
    assert timings["prefill_ms"] >= 10
    assert timings["decode_ms"] >= 4 * 10 - 1
    used = answer.json()["usage"]
    prefill = 1000 * used["prompt_tokens"] / timings["prefill_ms"]
    assert timings["prefill_tokens_per_second"] == pytest.approx(prefill, rel=0.01)
    # The first token comes out of the prefill.
    assert timings["decode_tokens_per_second"] == pytest.approx(1000 * 4 / timings["decode_ms"], rel=0.01)
    header = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    assert {f"{name}_ms": float(value) for name, value in header.items()}.items() <= timings.items()


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
def test_a_stream_has_them_once_in_the_last_chunk_of_its_choices(
    slow: LiveServer, path: str, body: dict[str, Any], usage: bool
) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    found = chunks(
        slow, path, {**body, "max_tokens": 3, "n": 2, "temperature": 1, "return_timings": True, **options}
    )
    last = found[-2] if usage else found[-1]
    assert set(last["timings"]) == FIELDS
    assert last["choices"][0]["finish_reason"] is not None
    assert all("timings" not in chunk for chunk in found if chunk is not last)


def test_nothing_drawn_has_no_rate_and_nobody_else_gets_them(slow: LiveServer) -> None:
    timings = slow.complete(prompt="a", max_tokens=0, return_timings=True)["timings"]
    assert timings["decode_tokens_per_second"] is None
    assert timings["prefill_tokens_per_second"] > 0
    assert "timings" not in slow.complete(prompt="a", max_tokens=1)
    assert "timings" not in slow.complete(prompt="a", max_tokens=1, return_timings=False)
    assert slow.refused("/v1/completions", {"prompt": "a", "return_timings": 1})["param"] == "return_timings"
