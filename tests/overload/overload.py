"""Measures the best that the server does for as many clients as it has places for, then sends ten times as
many, and checks what must hold: refusals are 429 with a time to come back, nothing fails, memory stays
bounded, and the counters of both sides add up. Whether accepted requests keep their deadline, and how much of
the best is left, stands in the summary."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.overload.load import DEADLINE, Tally, clients
from tests.soak.server_process import MAX_NUM_SEQS, Samples, ServerProcess

QUEUED = 16
PLACES = MAX_NUM_SEQS + QUEUED
NUM_CLIENTS = 10 * PLACES
FLAGS = ("--max-queued-requests", str(QUEUED))
CACHE_TOKENS = 2 * PLACES * 128  # enough for what runs: the places are the limit, not the cache
MAX_MEMORY_GROWTH = 64 << 20
RAMP = 0.15  # share of each measurement that is left out at its beginning


@dataclass(slots=True)
class Summary:
    seconds: float
    best: float  # tokens per second
    goodput: float
    tally: Tally
    memory_growth: int

    @property
    def share(self) -> float:
        return self.goodput / self.best

    @property
    def keeps_deadlines(self) -> bool:
        """Whether accepted requests were answered in time. A machine with other work may be to blame when
        not."""
        tally = self.tally
        return tally.percentile(0.99) <= DEADLINE and tally.num_timed_out <= 0.01 * len(tally.answers)

    def line(self) -> str:
        tally = self.tally
        return (
            f"overload: {NUM_CLIENTS} clients on {PLACES} places for {self.seconds:g} s: "
            f"goodput {self.goodput:.0f} of {self.best:.0f} tokens/s ({self.share:.1%}); "
            f"{len(tally.answers)} finished, {tally.num_refused} refused, "
            f"{tally.num_left} left, {tally.num_timed_out} timed out; p99 {tally.percentile(0.99):.2f} s of "
            f"{DEADLINE:g} s; Retry-After {min(tally.waits)} to {max(tally.waits)} s; "
            f"memory {self.memory_growth / 2**20:+.1f} MiB"
        )


async def run(server: ServerProcess, seconds: float) -> Summary:
    """``seconds`` of overload, and half as much before and after it to measure the best. Raises
    AssertionError."""
    before = await _levels(server, seconds / 4, "before")
    start, memory = await _idle(server), server.resident_bytes
    tally = Tally()
    with _peak_memory(server) as peak:
        goodput = await _measure(server, NUM_CLIENTS, seconds, "crowd", tally)
    end = await _idle(server)
    after = await _levels(server, seconds / 4, "after")
    best = max((early + late) / 2 for early, late in zip(before, after, strict=True))
    summary = Summary(seconds, best, goodput, tally, peak[0] - memory)
    _check(summary, _served(end) - _served(start))
    return summary


async def _levels(server: ServerProcess, seconds: float, name: str) -> list[float]:
    """Goodput with as many clients as can run, and with the queue full as well."""
    levels = (MAX_NUM_SEQS, PLACES)
    return [
        await _measure(server, count, seconds / len(levels), f"{name}-{count}", Tally()) for count in levels
    ]


async def _measure(server: ServerProcess, count: int, seconds: float, name: str, tally: Tally) -> float:
    began = asyncio.get_running_loop().time()
    await clients(server.port, count, tally, began + seconds, name)
    return tally.goodput(began + RAMP * seconds, began + seconds)


async def _idle(server: ServerProcess) -> Samples:
    """The metrics once nothing is in the server any more."""
    async with asyncio.timeout(60):
        while True:
            samples = await asyncio.to_thread(server.samples)
            names = ("requests_running", "requests_waiting", "streams_active")
            in_flight = samples["http_requests_in_flight", frozenset({("route", "/v1/completions")})]
            if not in_flight and not any(samples[name, frozenset()] for name in names):
                return samples
            await asyncio.sleep(0.1)


@contextmanager
def _peak_memory(server: ServerProcess) -> Iterator[list[int]]:
    """One element: the most that the process held at the moments looked at."""
    peak = [server.resident_bytes]

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.25)
            peak[0] = max(peak[0], server.resident_bytes)

    task = asyncio.create_task(watch())
    try:
        yield peak
    finally:
        task.cancel()


def _served(samples: Samples) -> Counter[str]:
    """Completions by how the metrics say they ended, and all of them as HTTP counted them."""
    counts: Counter[str] = Counter()
    for (name, labels), value in samples.items():
        label = dict(labels)
        if (
            name == "http_requests_total"
            and label["route"] == "/v1/completions"
            and label["method"] == "POST"
        ):
            counts["received"] += int(value)
            counts[f"status {label['status'][0]}xx"] += int(value)
        elif name in ("requests_total", "request_rejections_total") and label["endpoint"] == "completions":
            counts[label.get("outcome") or label["reason"]] += int(value)
    return counts


def _check(summary: Summary, counts: Counter[str]) -> None:
    tally, line = summary.tally, f"{summary.line()}; {dict(counts)}"
    assert min(len(tally.answers), tally.num_refused, tally.num_left) > 0, line
    assert counts["status 5xx"] == 0, line
    assert all(1 <= wait <= 60 for wait in tally.waits), line
    assert summary.memory_growth < MAX_MEMORY_GROWTH, line
    # received = finished + rejected + left. Of those that left, some were finished or refused without knowing
    # it.
    finished = counts["stop"] + counts["length"]
    assert counts["received"] == tally.num_sent, line
    assert (
        counts["received"]
        == finished + counts["queue_full"] + counts["client_disconnect"] + counts["timeout"]
    ), line
    assert finished >= len(tally.answers), line
    assert counts["queue_full"] >= tally.num_refused, line
