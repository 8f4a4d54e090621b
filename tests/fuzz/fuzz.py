"""Sends the attacks, several at a time, and looks at what comes back and at the server before and after: it
answers, the same text as before; nothing runs, no block is held, no connection is open; memory is where it
was; its log holds no fault."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.fuzz.attacks import Attack, Attacks
from tests.http.cache.tiny_server import COMPLETIONS, ids
from tests.soak.server_process import ServerProcess

AT_ONCE = 16
# What is sent is refused, cut by its own two seconds, or closed by these flags.
FLAGS = ("--read-timeout", "2", "--keep-alive-timeout", "1", "--debug-invariants")
PATIENCE = 60.0
TRIES = 3
# share of the requests after which memory counts: what a process comes to keep depends on their number
WARM_UP = 0.25
MAX_MEMORY_GROWTH = 16 << 20
# A short run still uses parts of the server and of the allocator for the first time after its warm-up.
LONG_RUN, MAX_MEMORY_GROWTH_OF_SHORT_RUNS = 5000, 64 << 20
GREEDY: dict[str, Any] = {"prompt": ids(40, seed=7), "max_tokens": 24, "temperature": 0, "ignore_eos": True}
_FAULT = re.compile(r" (ERROR|CRITICAL) |Traceback", re.MULTILINE)


@dataclass(slots=True)
class Summary:
    seed: int
    num_requests: int
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    memory_before: int = 0
    memory_after: int = 0
    descriptors_before: int = 0
    descriptors_after: int = 0

    def line(self) -> str:
        statuses = ", ".join(f"{count} x {status}" for status, count in sorted(self.statuses.items()))
        return (
            f"fuzz: {self.num_requests} hostile requests of {len(self.kinds)} kinds; answers: {statuses}; "
            f"memory {self.memory_before / 2**20:.1f} to {self.memory_after / 2**20:.1f} MiB, "
            f"descriptors {self.descriptors_before} to {self.descriptors_after}; seed {self.seed}"
        )


async def run(server: ServerProcess, num_requests: int, seed: int) -> Summary:
    """Raises AssertionError with the first thing found wrong."""
    summary = Summary(seed, num_requests)
    async with _client(server) as client:
        openapi = (await client.get("/openapi.json")).json()
        expected = await _greedy(client)
    await _wait_until_idle(server)
    summary.descriptors_before = server.num_descriptors
    attacks = Attacks(openapi, seed)
    warm_up = int(WARM_UP * num_requests)
    await _send_all(server, attacks, warm_up, summary)
    await _wait_until_idle(server)
    summary.memory_before = server.resident_bytes
    await _send_all(server, attacks, num_requests - warm_up, summary)
    await _wait_until_idle(server)
    summary.memory_after = server.resident_bytes
    async with _client(server) as client:
        assert await _greedy(client) == expected
        assert (await client.get("/health")).status_code == 200
    await _check_descriptors(server, summary)
    fault = _FAULT.search(server.log_tail(None))
    assert fault is None, server.log_tail(None)[max(0, fault.start() - 2000) : fault.start() + 4000]
    allowed = MAX_MEMORY_GROWTH if num_requests >= LONG_RUN else MAX_MEMORY_GROWTH_OF_SHORT_RUNS
    assert summary.memory_after - summary.memory_before < allowed, summary.line()
    return summary


@asynccontextmanager
async def _client(server: ServerProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE) as client:
        yield client


async def _greedy(client: httpx.AsyncClient) -> str:
    response = await client.post(COMPLETIONS, json=GREEDY)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


async def _send_all(server: ServerProcess, attacks: Attacks, count: int, summary: Summary) -> None:
    left = count

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            attack = attacks.next()
            summary.kinds[attack.kind] += 1
            summary.statuses[await _send_until_answered(server.port, attack)] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(worker())


async def _send_until_answered(port: int, attack: Attack) -> str:
    """On a busy machine the client itself may be too slow for the server's patience, but not again and
    again."""
    for _ in range(TRIES):
        outcome = await _send(port, attack)
        if outcome != "closed" or not attack.answered:
            return outcome
    raise AssertionError(f"closed without an answer: {_shown(attack)}")


async def _send(port: int, attack: Attack) -> str:
    """The status of the first answer, or how else it ended."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        # The server may close while the client still sends.
        with suppress(ConnectionError):
            for piece in attack.pieces:
                writer.write(piece)
                await asyncio.wait_for(writer.drain(), PATIENCE)
                await asyncio.sleep(attack.pause)
        if attack.leaves:
            return "left"
        with suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE):
                while data := await reader.read(1 << 16):
                    received += data
    except TimeoutError:
        raise AssertionError(
            f"neither an end nor an answer within {PATIENCE:g} s: {_shown(attack)}"
        ) from None
    finally:
        if attack.resets:
            writer.transport.abort()
        else:
            writer.close()
    return _checked(attack, received)


def _checked(attack: Attack, received: bytes) -> str:
    """The status; asserts that no answer is a fault of the server, and that errors have the one form."""
    if not received:
        return "closed"
    answers = list(_answers(received, attack.is_head))
    for answer in answers:
        assert answer.status < 500, (_shown(attack), received[:2000])
        if answer.status >= 400 and answer.body:
            assert answer.content_type == b"application/json", (_shown(attack), received[:2000])
            # OpenAI's form, or Anthropic's.
            assert set(json.loads(answer.body)) in ({"error"}, {"type", "error", "request_id"}), (
                _shown(attack),
                received[:2000],
            )
    return str(answers[0].status)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    content_type: bytes
    body: bytes


def _answers(received: bytes, is_head: bool) -> Iterator[Answer]:
    """One after the other; a stream is the last one, for its end is not looked for."""
    while received:
        assert received.startswith(b"HTTP/1.1 "), received[:2000]
        head, end, received = received.partition(b"\r\n\r\n")
        assert end, head[:2000]
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
        }
        status = int(head.split(b" ")[1])
        size = 0 if is_head or status == 100 else int(headers.get(b"content-length", len(received)))
        body, received = received[:size], received[size:]
        assert len(body) == size, head[:2000]
        yield Answer(status, headers.get(b"content-type", b""), body)


def _shown(attack: Attack) -> str:
    return f"{attack.kind}: {b'|'.join(attack.pieces)[:3000]!r}"


async def _wait_until_idle(server: ServerProcess) -> None:
    async with asyncio.timeout(PATIENCE):
        while busy := await asyncio.to_thread(_busy, server):
            del busy
            await asyncio.sleep(0.2)


def _busy(server: ServerProcess) -> dict[str, float]:
    names = ("requests_running", "requests_waiting", "streams_active")
    return {
        name: value
        for (name, labels), value in server.samples().items()
        if value
        and (
            name in names
            or (name == "kv_cache_blocks" and ("state", "used") in labels)
            or (name == "http_requests_in_flight" and ("route", "/metrics") not in labels)
        )
    }


async def _check_descriptors(server: ServerProcess, summary: Summary) -> None:
    """Connections that the server closes linger for a moment."""
    async with asyncio.timeout(PATIENCE):
        while True:
            summary.descriptors_after = server.num_descriptors
            if summary.descriptors_after <= summary.descriptors_before:
                return
            await asyncio.sleep(0.2)
