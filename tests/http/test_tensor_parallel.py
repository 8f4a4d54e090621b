"""``gemserve serve --tensor-parallel-size 2`` on two CPU processes: what it serves is what one process
serves, and the end of either process is the end of both."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from server.loading.load import load_engine
from tests.http.live_server import live_server
from tests.server.cli.processes import ROOT, line_with, wait_for_lines
from tests.tiny import write_tiny_folder

DEADLINE = 120
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 16,
    "kv_cache_memory": "16MiB",
    "num_threads": 1,
}
BODY = {
    "prompt": "The capital of France is",
    "max_tokens": 100,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


@dataclass
class Served:
    process: "subprocess.Popen[str]"
    url: str
    log: list[str]

    @property
    def rank_1(self) -> psutil.Process:
        (process,) = psutil.Process(self.process.pid).children()
        return process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Served]:
    flags = [part for name, value in SETTINGS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [
        sys.executable,
        "-m",
        "server",
        "serve",
        str(folder),
        "--port",
        "0",
        "--tensor-parallel-size",
        "2",
        *flags,
    ]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = wait_for_lines(process, "listening on", "ready: serving")
            port = line_with("listening on", lines).rsplit(":", 1)[1].strip()
            yield Served(process, f"http://127.0.0.1:{port}", lines)
        finally:
            process.kill()


def streamed(client: httpx.Client) -> list[str]:
    """The events of a completion, without what differs between any two."""
    with client.stream("POST", "/v1/completions", json=BODY, timeout=DEADLINE) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line]
    return ['"choices"' + line.partition('"choices"')[2] if '"choices"' in line else line for line in lines]


def test_two_processes_serve_what_one_does_and_end_together(folder: Path) -> None:
    with live_server(load_engine, model=str(folder), **SETTINGS) as alone:
        expected = streamed(alone.client)
    assert len(expected) > 50
    with serving(folder) as served, httpx.Client(base_url=served.url) as client:
        text = "".join(served.log)
        assert "2 share the model" in text
        assert "divided among 2 ranks" in text
        assert streamed(client) == expected
        assert "gemserve_tensor_parallel_size 2.0" in client.get("/metrics").text.splitlines()
        rank_1 = served.rank_1
        os.kill(rank_1.pid, signal.SIGKILL)  # while nothing runs
        _, rest = served.process.communicate(timeout=DEADLINE)
        assert served.process.returncode == 1
        (line,) = [line for line in rest.splitlines() if line.startswith("gemserve: error:")]
        assert f"rank 1 of 2 (process {rank_1.pid}) was ended by SIGKILL" in line


def test_a_server_that_ends_in_order_ends_its_ranks(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = set(psutil.Process().children())
    with live_server(load_engine, model=str(folder), tensor_parallel_size=2, **SETTINGS) as served:
        (rank_1,) = set(psutil.Process().children()) - before
        served.check_alive()
    assert not rank_1.is_running()
    assert [record.message for record in caplog.records if "rank 1" in record.message] == [], (
        "an end in order is no fault"
    )
