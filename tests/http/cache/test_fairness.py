"""Streams, long and short prompts side by side: everyone moves."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.http.cache.tiny_server import COMPLETIONS, ids, is_empty, tiny_server
from tests.http.live_server import LiveServer


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[LiveServer]:
    with tiny_server(tiny_folder, pool_tokens=12_000, max_num_batched_tokens=256, max_num_seqs=4) as live:
        yield live


class Stream:
    """A stream read in a thread of its own; ``times`` is when its chunks came."""

    def __init__(self, server: LiveServer, prompt: list[int], max_tokens: int) -> None:
        self.times: list[float] = []
        self._closed = threading.Event()
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 0,
        }
        self._thread = threading.Thread(target=self._read, args=(server, body))
        self.sent = time.monotonic()
        self._thread.start()

    def _read(self, server: LiveServer, body: dict[str, Any]) -> None:
        with server.client.stream("POST", COMPLETIONS, json=body) as response:
            assert response.status_code == 200
            for _ in response.iter_raw():
                self.times.append(time.monotonic())
                if self._closed.is_set():
                    return

    def wait_first(self) -> float:
        """Seconds from sending to the first chunk."""
        wait_until(lambda: bool(self.times))
        return self.times[0] - self.sent

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.002)


def test_a_long_prefill_stops_neither_a_running_stream_nor_a_short_request(server: LiveServer) -> None:
    running = Stream(server, ids(10, seed=1), 4000)
    wait_until(lambda: len(running.times) > 40)
    long = Stream(server, ids(4000, seed=2), 4)
    time.sleep(0.05)
    short = Stream(server, ids(2, seed=3), 8)
    long.wait_first()
    short.wait_first()
    between = [t for t in running.times if long.sent <= t <= long.times[0]]
    short_waited = [t for t in between if short.sent <= t <= short.times[0]]
    for stream in (running, short, long):
        stream.close()
    # The steps are the clock: 4000 tokens take 16 of them, whatever else the machine does; one or two are
    # lost at either end between what the server did and what the clients saw of it.
    assert len(between) > 10, "the running stream moves in every step of the prefill"
    assert len(short_waited) <= len(between) / 2, "the short one starts long before the prefill ends"
    server.wait_for(lambda: is_empty(server))


def test_a_long_request_gets_in_under_a_steady_flow_of_short_ones(server: LiveServer) -> None:
    done = threading.Event()
    counts = [0] * 6

    def flow(worker: int) -> None:
        while not done.is_set():
            prompt = ids(12, seed=1000 * worker + counts[worker])
            server.complete(prompt=prompt, max_tokens=8, temperature=0, ignore_eos=True)
            counts[worker] += 1

    with ThreadPoolExecutor(len(counts)) as pool:  # more workers than --max-num-seqs: somebody always waits
        futures = [pool.submit(flow, worker) for worker in range(len(counts))]
        try:
            wait_until(lambda: sum(counts) > 12)
            before = sum(counts)
            long = Stream(server, ids(2000, seed=4), 2)
            long.wait_first()
            served_meanwhile = sum(counts) - before
            long.close()
        finally:
            done.set()
        for future in futures:
            future.result()
    assert served_meanwhile > 0, "the short ones go on"
    # First come, first served: at most those already there go first, and its 2000 tokens take at most 2000 /
    # 16 + 1 steps, of which a short request needs at least eight; four run at once.
    assert served_meanwhile < 6 + 4 * 126 / 8
