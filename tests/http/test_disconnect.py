"""A client that leaves stops the work at once, whatever state it is in, with the id and key middlewares
active."""

import asyncio
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes import FakeRunner, fake_engine_factory
from tests.http.live_server import LiveServer, live_server
from tests.soak.client import Leave, send

KEY = "secret"
NEVER = 10**9


@pytest.fixture(scope="module")
def slow_server() -> Iterator[LiveServer]:
    """Two sequences at a time, 10 ms a step, and prompts of 2 ms a token in chunks of 32."""
    runner = FakeRunner(step_delay=0.01, token_delay=0.002)
    factory = fake_engine_factory(runner, max_model_len=8192, max_num_seqs=2, max_num_batched_tokens=32)
    with live_server(factory, wait=False, api_key=(KEY,)) as live:
        live.client.headers["authorization"] = f"Bearer {KEY}"
        live.wait_for(lambda: live.client.get("/health").status_code == 200)
        yield live


def open_request(server: LiveServer, body: dict[str, Any]) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    connection.sendall(head.encode() + payload)
    return connection


def read_chunks(connection: socket.socket, count: int) -> None:
    received = b""
    while received.count(b"data: ") < count:
        received += connection.recv(4096)


def assert_idle_within_a_second(server: LiveServer) -> None:
    """The steps are the clock: a second has a hundred of them, and what was asked for takes thousands."""
    at_close = server.metric("generation_tokens_total")
    server.wait_for(server.is_idle)
    assert server.metric("generation_tokens_total") - at_close <= 200, "two choices"
    generated = server.metric("generation_tokens_total")
    time.sleep(0.1)
    assert server.metric("generation_tokens_total") == generated
    server.wait_for(lambda: server.metric("streams_active") == 0)
    assert server.metric("kv_cache_blocks", pool="global", state="used") == 0
    assert server.metric("kv_cache_blocks", pool="local", state="used") == 0


def disconnects(server: LiveServer) -> float:
    return sum(
        server.metric("requests_total", endpoint="completions", stream=stream, outcome="client_disconnect")
        for stream in ("true", "false")
    )


@pytest.mark.parametrize("n", [1, 2])
def test_after_a_few_chunks_of_a_stream(slow_server: LiveServer, n: int) -> None:
    before = disconnects(slow_server)
    with open_request(slow_server, {"prompt": "a", "max_tokens": 4000, "stream": True, "n": n}) as connection:
        read_chunks(connection, 3)
    assert_idle_within_a_second(slow_server)
    assert disconnects(slow_server) == before + 1


@pytest.mark.parametrize("stream", [True, False])
def test_during_prefill(slow_server: LiveServer, stream: bool) -> None:
    before = disconnects(slow_server)
    with open_request(slow_server, {"prompt": [9 + stream] * 4000, "max_tokens": 4000, "stream": stream}):
        slow_server.wait_for(lambda: slow_server.metric("requests_running") == 1)
    assert_idle_within_a_second(slow_server)
    assert disconnects(slow_server) == before + 1


@pytest.mark.parametrize("stream", [True, False])
def test_while_queued(slow_server: LiveServer, stream: bool) -> None:
    with open_request(slow_server, {"prompt": ["a", "b"], "max_tokens": 4000, "stream": True}) as busy:
        read_chunks(busy, 1)
        with open_request(slow_server, {"prompt": "c", "max_tokens": 4000, "stream": stream}):
            slow_server.wait_for(lambda: slow_server.metric("requests_waiting") == 1)
        slow_server.wait_for(lambda: slow_server.metric("requests_waiting") == 0)
        assert slow_server.metric("requests_running") == 2
    assert_idle_within_a_second(slow_server)


@pytest.mark.parametrize("stream", [True, False])
def test_while_its_prompt_is_encoded(
    slow_server: LiveServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    tokenizer = slow_server.app.state.server.loaded.tokenizer
    encode = tokenizer.encode

    def slow_encode(text: str) -> list[int]:
        begun.set()
        assert go_on.wait(60)
        ids: list[int] = encode(text)
        return ids

    monkeypatch.setattr(tokenizer, "encode", slow_encode)
    before, started = disconnects(slow_server), slow_server.metric("prompt_tokens_total")
    with open_request(slow_server, {"prompt": "a", "max_tokens": 4000, "stream": stream}):
        assert begun.wait(60)
    go_on.set()
    slow_server.wait_for(lambda: disconnects(slow_server) == before + 1)
    assert_idle_within_a_second(slow_server)
    assert slow_server.metric("prompt_tokens_total") == started


def test_in_an_unstreamed_call(slow_server: LiveServer) -> None:
    before = disconnects(slow_server)
    with open_request(slow_server, {"prompt": "a", "max_tokens": 4000}):
        slow_server.wait_for(lambda: slow_server.metric("requests_running") == 1)
    assert_idle_within_a_second(slow_server)
    assert disconnects(slow_server) == before + 1


def test_with_another_request_behind_it_on_the_same_connection(slow_server: LiveServer) -> None:
    before, started = disconnects(slow_server), slow_server.metric("prompt_tokens_total")
    with open_request(slow_server, {"prompt": [9] * 5, "max_tokens": 4000, "stream": True}) as connection:
        connection.sendall(
            f"GET /health HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n\r\n".encode()
        )
        read_chunks(connection, 3)
    assert_idle_within_a_second(slow_server)
    assert disconnects(slow_server) == before + 1
    assert slow_server.metric("prompt_tokens_total") == started + 5


def test_in_the_middle_of_its_body(slow_server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", slow_server.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"
        connection.sendall(
            f'{head}content-type: application/json\r\ncontent-length: 100\r\n\r\n{{"prompt":'.encode()
        )
        time.sleep(0.05)
    assert_idle_within_a_second(slow_server)
    assert slow_server.metric("http_requests_in_flight", route="/v1/completions") == 0


def test_thirty_streams_closed_at_once_leave_nothing(slow_server: LiveServer) -> None:
    connections = [
        open_request(slow_server, {"prompt": "a", "max_tokens": 4000, "stream": True}) for _ in range(30)
    ]
    slow_server.wait_for(lambda: slow_server.metric("requests_waiting") == 28)
    for connection in connections:
        connection.close()
    assert_idle_within_a_second(slow_server)


def test_three_hundred_clients_that_leave_at_any_moment_leave_nothing() -> None:
    """While queued, in the middle of a prefill, after 1, 5 or 50 tokens, in the step in which the answer
    ends; by a reset or not. The judge is a request that needs nearly all of the cache."""

    def leaves(choose: random.Random) -> Leave | None:
        if choose.random() < 0.1:
            return None
        events = choose.choice((0, 1, 5, 50, NEVER))
        return Leave(
            events,
            choose.choice((0.0, 0.005, 0.05, 0.5)) if events == NEVER else 60.0,
            reset=choose.random() < 0.5,
        )

    async def crowd(port: int) -> Counter[bool]:
        choose, at_once = random.Random(23), asyncio.Semaphore(40)

        async def client(number: int) -> bool:
            body = {
                "prompt": [choose.randrange(120, 500) for _ in range(choose.choice((1, 20, 400)))],
                "max_tokens": choose.choice((1, 5, 50, 100)),
                "stream": choose.random() < 0.7,
                "n": choose.choice((1, 1, 2)),
            }
            leave = (
                leaves(choose)
                if body["stream"]
                else Leave(NEVER, choose.choice((0.0, 0.005, 0.05)), reset=choose.random() < 0.5)
            )
            async with at_once:
                return (
                    await send(port, "/v1/completions", json.dumps(body).encode(), f"r{number}", leave)
                ).left

        return Counter(await asyncio.gather(*(client(number) for number in range(300))))

    with live_server(fake_engine_factory(FakeRunner(step_delay=0.001), max_num_seqs=4)) as server:
        left = asyncio.run(crowd(server.port))
        assert min(left.values()) > 20, left
        server.wait_for(server.is_idle)
        server.wait_for(lambda: server.metric("http_requests_in_flight", route="/v1/completions") == 0)
        for pool in ("global", "local"):
            assert server.metric("kv_cache_blocks", pool=pool, state="used") == 0
        admission = server.app.state.server.admission
        assert (admission.num_requests, admission.num_tokens) == (0, 0)
        whole = [[choose % 300 + 120] * 500 for choose in range(4)]
        assert server.complete(prompt=whole, max_tokens=12)["usage"]["completion_tokens"] == 48
