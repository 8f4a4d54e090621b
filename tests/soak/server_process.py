"""``gemserve serve`` with the tiny model in a process of its own: its address, memory, metrics and request
log."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.http.cache.tiny_server import cache_memory
from tests.tiny import write_tiny_folder

ROOT = Path(__file__).parent.parent.parent
BLOCK_SIZE = 16
CACHE_TOKENS = 640
MAX_NUM_SEQS = 16
MAX_NUM_BATCHED_TOKENS = 128

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

_LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")
_RECORD = re.compile(
    r"gemserve\.request: \S+ request_id=(\S+) (\w+) (\w+) "
    r"prompt_tokens=(\d+) generated_tokens=(\d+) ttft=(\S+)"
)


@dataclass(frozen=True, slots=True)
class LogRecord:
    """What the server says about a request at its end."""

    endpoint: str
    outcome: str
    prompt_tokens: int
    generated_tokens: int
    started: bool  # some sequence had a first token


class ServerProcess:
    def __init__(self, process: subprocess.Popen[bytes], log: Path, port: int) -> None:
        self.port = port
        self._process = process
        self._log = log
        self._log_offset = 0
        self._client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=60, headers={"connection": "close"}
        )
        self._memory = psutil.Process(process.pid)

    @property
    def resident_bytes(self) -> int:
        return self._memory.memory_info().rss

    @property
    def num_descriptors(self) -> int:
        return self._memory.num_fds()

    def samples(self) -> Samples:
        found: Samples = {}
        for line in self._client.get("/metrics").text.splitlines():
            match = re.fullmatch(r"gemserve_(\w+)(?:\{(.*)\})? (\S+)", line)
            if match:
                found[match[1], frozenset(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))] = float(match[3])
        return found

    def new_records(self) -> dict[str, LogRecord]:
        """Requests that ended since the last call, by their id."""
        with self._log.open("rb") as file:
            file.seek(self._log_offset)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._log_offset += len(text)
        return {
            request_id: LogRecord(endpoint, outcome, int(prompt), int(generated), ttft != "-")
            for request_id, endpoint, outcome, prompt, generated, ttft in _RECORD.findall(text.decode())
        }

    def log_tail(self, num_characters: int | None = 4000) -> str:
        """Without the lines of requests; None: all of it."""
        lines = self._log.read_text(errors="replace").splitlines()
        text = "\n".join(line for line in lines if "gemserve.request" not in line)
        return text if num_characters is None else text[-num_characters:]

    def close(self) -> None:
        self._client.close()


@contextlib.contextmanager
def server_process(
    folder: Path, *flags: str, cache_tokens: int = CACHE_TOKENS, environ: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """Ends with SIGTERM and must then exit with 0."""
    model = write_tiny_folder(folder / "tiny")
    log = folder / "server.log"
    memory = cache_memory(cache_tokens, BLOCK_SIZE, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, prefix_caching=True)
    command = [
        *(
            sys.executable,
            "-m",
            "server",
            "serve",
            str(model),
            "--port",
            "0",
            "--dtype",
            "float32",
            "--num-threads",
            "1",
        ),
        *(
            "--kv-cache-memory",
            str(memory),
            "--block-size",
            str(BLOCK_SIZE),
            "--max-num-seqs",
            str(MAX_NUM_SEQS),
        ),
        *("--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS), "--shutdown-timeout", "5", *flags),
    ]
    options: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, **(environ or {})}}
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **options) as process,
    ):
        try:
            server = ServerProcess(process, log, _wait_for_port(process, log))
            try:
                _wait_until_ready(server, process)
                yield server
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=30) == 0, server.log_tail()
            finally:
                server.close()
        finally:
            process.kill()


def _wait_for_port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + 180
    while (found := _LISTENING.search(log.read_text())) is None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, "the server does not listen"
        time.sleep(0.05)
    return int(found[1])


def _wait_until_ready(server: ServerProcess, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 180  # the first start on a machine compiles the kernels
    while server.samples().get(("ready", frozenset())) != 1:
        assert process.poll() is None, server.log_tail()
        assert time.monotonic() < deadline, "the server is not ready"
        time.sleep(0.05)
