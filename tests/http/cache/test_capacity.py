"""The cache's budget: what can never fit is refused, what fits ends, a growing request holds no more of the
local pool, and clients that leave give everything back."""

import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.http.cache.tiny_server import COMPLETIONS, ask, at_once, ids, is_empty, tiny_server, used_blocks
from tests.http.live_server import LiveServer, error_of
from tests.http.test_disconnect import open_request, read_chunks
from tests.tiny import WINDOW

ROOT = Path(__file__).parent.parent.parent.parent
BUDGET = 2048


@pytest.fixture(scope="module")
def small(tiny_folder: Path) -> Iterator[LiveServer]:
    with tiny_server(tiny_folder, pool_tokens=BUDGET, max_num_batched_tokens=256) as live:
        yield live


def greedy(prompt: list[int], max_tokens: int, **others: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **others}


def test_a_block_larger_than_the_window_is_refused_at_start_with_the_remedy(tiny_folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "server",
        "serve",
        str(tiny_folder),
        "--port",
        "0",
        "--block-size",
        "1024",
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert (
        f"--block-size 1024 does not divide the model's sliding window of {WINDOW} tokens"
        in ended.stderr.splitlines()[-1]
    )


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_a_growing_request_holds_a_constant_number_of_local_blocks(
    tiny_folder: Path, block_size: int
) -> None:
    with tiny_server(tiny_folder, pool_tokens=1024, block_size=block_size, max_num_seqs=4) as server:
        alone = ask(server, greedy(ids(100, seed=3), 8, logprobs=1))
        held: list[float] = []
        body = greedy(ids(100, seed=3), 180, stream=True, logprobs=1)
        for _ in range(20):
            with server.client.stream("POST", COMPLETIONS, json=body) as response:
                for count, _ in enumerate(response.iter_raw()):
                    if count % 12 == 0:
                        used = used_blocks(server, "local")
                        if server.metric("requests_running") == 1:  # not if the reader has fallen behind
                            held.append(used)
            if len(held) > 10:
                break
        assert len(held) > 10
        # Seen between two steps. The window of the next query is W - 1 keys and the query itself, counted
        # from a block's begin.
        assert max(held) <= WINDOW // block_size + 1
        assert min(held) >= (WINDOW - 1) // block_size, "the window itself is held"
        assert server.metric("kv_cache_recycled_blocks_total") >= (280 - WINDOW) // block_size - 2
        several = at_once(lambda seed: ask(server, greedy(ids(100, seed=seed), 8, logprobs=1)), range(3, 7))
        assert several[0].text == alone.text
        server.wait_for(lambda: is_empty(server))


def test_what_can_never_fit_is_refused_at_once_and_blocks_nobody(small: LiveServer) -> None:
    steps = small.metric("engine_steps_total", kind="prefill")
    error = error_of(small.post(COMPLETIONS, greedy(ids(3000), 4)))
    assert small.metric("engine_steps_total", kind="prefill") == steps
    assert error["code"] == "context_length_exceeded"
    assert f"maximum context length is {BUDGET} tokens" in error["message"]
    assert small.complete(prompt="Hi", max_tokens=4)["usage"]["completion_tokens"] <= 4


def test_a_request_that_fills_the_whole_cache_ends_with_length(small: LiveServer) -> None:
    answer = ask(small, greedy(ids(1500, seed=1), 1000))
    assert answer.finish_reason == "length"
    assert answer.usage["completion_tokens"] == BUDGET - 1500
    assert ask(small, greedy(ids(3), 4)).usage["completion_tokens"] == 4


class _Client:
    """A request over a socket of its own, to be closed at any time."""

    def __init__(self, server: LiveServer, body: dict[str, Any]) -> None:
        self.socket = open_request(server, body)

    def __enter__(self) -> socket.socket:
        return self.socket

    def __exit__(self, *error: object) -> None:
        self.socket.close()


def leave_at_random(server: LiveServer, seed: int) -> None:
    """Close a request after 0, 1, 5 or 50 tokens, or after a moment: queued, in its prefill or in its last
    step."""
    choose = random.Random(seed)
    streamed = choose.random() < 0.7
    body = greedy(
        ids(choose.choice((3, 40, 300, 700)), seed=seed % 7),
        choose.choice((1, 5, 60)),
        stream=streamed,
        logprobs=0,
    )
    with _Client(server, body) as connection:
        if streamed and choose.random() < 0.6:
            read_chunks(connection, min(choose.choice((1, 5, 50)), body["max_tokens"]))
        else:
            time.sleep(choose.choice((0.0, 0.005, 0.05, 0.3)))


def test_clients_that_leave_at_any_moment_leave_nothing_behind(small: LiveServer) -> None:
    for start in range(0, 80, 16):  # twice as many at once as may run
        at_once(lambda seed: leave_at_random(small, seed), range(start, start + 16))
    small.wait_for(lambda: is_empty(small))
    answer = ask(small, greedy(ids(BUDGET - 8, seed=99), 8))
    assert answer.usage["completion_tokens"] == 8
    small.wait_for(lambda: is_empty(small))


def test_gauges_fall_to_zero_without_new_traffic_when_thirty_streams_close_at_once(small: LiveServer) -> None:
    with ExitStack() as stack:
        for seed in range(30):
            stack.enter_context(_Client(small, greedy(ids(20, seed=200 + seed), 1000, stream=True)))
        small.wait_for(
            lambda: small.metric("requests_running") == 8 and small.metric("requests_waiting") == 22
        )
        assert used_blocks(small, "global") > 0
    small.wait_for(lambda: is_empty(small))
    small.wait_for(lambda: small.metric("streams_active") == 0)
    for pool in ("global", "local"):
        assert small.metric("kv_cache_usage_ratio", pool=pool) == 0
    assert small.metric("requests_waiting_oldest_age_seconds") == 0
