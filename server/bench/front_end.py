"""What a streamed token costs outside the model: the real application in a process of its own, over a device
that takes no time, and a client that does as little as it can.

The rate is what client and server reach together on this machine; the processor time is the server's alone,
of all its threads, from the first request of a round to the last byte of its answers.
"""

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import httpx
import psutil

from server.bench.load import Workload
from server.settings.settings import SettingsError

MODEL_NAME = "no-time"
START_TIMEOUT = 120.0
ANSWER_TIMEOUT = 600.0
READY_POLL_SECONDS = 0.05
READ_BYTES = 1 << 16
_EVENT, _LAST = b"data: ", b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Round:
    """All streams once, at the same time."""

    num_streams: int
    num_tokens: int
    num_events: int  # with text, or the reason of the end
    wall_seconds: float
    processor_seconds: float  # of the server

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.wall_seconds

    @property
    def microseconds_per_token(self) -> float:
        return 1e6 * self.processor_seconds / self.num_tokens

    def values(self) -> dict[str, float]:
        return {
            "streams": self.num_streams,
            "tokens": self.num_tokens,
            "events": self.num_events,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "processor_microseconds_per_token": round(self.microseconds_per_token, 2),
        }


def measure_front_end(
    num_streams: int, num_rounds: int, workload: Workload, progress: Callable[[str], None] = lambda line: None
) -> list[Round]:
    """One round more is run first, and not counted. Raises SettingsError when the server does not come up or
    does not answer."""
    rounds = []
    with _server(num_streams, workload.prompt_tokens + workload.output_tokens) as (process, port):
        for index in range(num_rounds + 1):
            measured = asyncio.run(_run_round(process, port, num_streams, workload))
            if index == 0:
                continue
            rounds.append(measured)
            progress(f"{num_streams} streams, round {index} of {num_rounds} done")
    return rounds


def render_rounds(rounds: list[Round]) -> str:
    """One line per round, then the medians."""
    lines = [f"{'streams':>7}{'tokens/s':>12}{'server us/token':>17}{'tokens/event':>14}"]
    lines += [
        f"{one.num_streams:>7}{one.tokens_per_second:>12,.0f}{one.microseconds_per_token:>17.1f}"
        f"{one.num_tokens / one.num_events:>14.2f}"
        for one in rounds
    ]
    rate = statistics.median(one.tokens_per_second for one in rounds)
    cost = statistics.median(one.microseconds_per_token for one in rounds)
    lines.append(f"{'median':>7}{rate:>12,.0f}{cost:>17.1f}")
    return "\n".join(lines)


@contextlib.contextmanager
def _server(num_streams: int, max_model_len: int) -> Iterator[tuple[psutil.Process, int]]:
    command = [
        sys.executable,
        "-m",
        "server.bench.front_end_server",
        MODEL_NAME,
        str(num_streams),
        str(max_model_len),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SettingsError("bench: the server without a model did not start; its output says why")
            port = int(line)
            _wait_until_ready(process, port)
            yield psutil.Process(process.pid), port
        finally:
            process.terminate()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[str], port: int) -> None:
    until = time.monotonic() + START_TIMEOUT
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=START_TIMEOUT, trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.ConnectError):
                if client.get("/health/ready").status_code == 200:
                    return
            if time.monotonic() > until or process.poll() is not None:
                raise SettingsError("bench: the server without a model did not become ready")
            time.sleep(READY_POLL_SECONDS)


async def _run_round(process: psutil.Process, port: int, num_streams: int, workload: Workload) -> Round:
    requests = [_request(workload, prompt) for prompt in islice(workload.prompts(), num_streams)]
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in requests]
    before, began = process.cpu_times(), time.perf_counter()
    streams = zip(connections, requests, strict=True)
    answers = await asyncio.gather(
        *(_stream(reader, writer, request) for (reader, writer), request in streams)
    )
    wall_seconds, after = time.perf_counter() - began, process.cpu_times()
    for _, writer in connections:
        writer.close()
    num_tokens = num_streams * workload.output_tokens
    counted = sum(tokens for tokens, _ in answers)
    if counted != num_tokens:
        raise SettingsError(f"bench: the server sent {counted} tokens, not {num_tokens}")
    processor_seconds = after.user + after.system - before.user - before.system
    return Round(
        num_streams, num_tokens, sum(events for _, events in answers), wall_seconds, processor_seconds
    )


def _request(workload: Workload, prompt: list[int]) -> bytes:
    body = json.dumps(workload.body(MODEL_NAME, prompt)).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> tuple[int, int]:
    """(tokens that the usage tells of, events of the choice). Only the last of them is parsed, once all have
    come."""
    writer.write(request)
    received = bytearray()
    async with asyncio.timeout(ANSWER_TIMEOUT):
        while _LAST not in received[-200:]:
            data = await reader.read(READ_BYTES)
            if not data:
                raise SettingsError(f"bench: a stream broke off: {bytes(received[-500:])!r}")
            received += data
    body = bytes(received).partition(_EVENT)[2].partition(_LAST)[0]
    *events, last = body.split(_EVENT)
    usage = json.loads(last)["usage"]
    return int(usage["completion_tokens"]), sum(b'"text":' in event for event in events)
