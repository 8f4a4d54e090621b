"""Several ``gemserve serve`` processes with the tiny model on free ports, and what their metrics say."""

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from tests.deploy.kustomize import ROOT

_LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")
_SAMPLE = re.compile(r"gemserve_(\w+)(?:\{(.*)\})? (\S+)")


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} within {seconds:g} seconds"
        time.sleep(0.1)


class Replica:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        self.url = ""
        self.client = httpx.Client(timeout=60)

    def listen(self) -> bool:
        assert self.process.poll() is None, self.log.read_text(encoding="utf-8")
        found = _LISTENING.search(self.log.read_text(encoding="utf-8"))
        if found is not None:
            self.url = f"http://127.0.0.1:{found[1]}"
        return found is not None

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text(encoding="utf-8")
        return self.client.get(f"{self.url}/health/ready").status_code == 200

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        total = 0.0
        for line in self.client.get(f"{self.url}/metrics").text.splitlines():
            match = _SAMPLE.fullmatch(line)
            if (
                match
                and match[1] == name
                and labels.items() <= dict(re.findall(r'(\w+)="([^"]*)"', match[2] or "")).items()
            ):
                total += float(match[3])
        return total

    @property
    def num_completions(self) -> float:
        return self.metric("http_requests_total", route="/v1/completions")

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def replicas(folder: Path, model: Path, count: int, *flags: str) -> Iterator[list[Replica]]:
    """Ready replicas. Those that still run at the end must end with 0 after SIGTERM."""
    command = [
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
    ]
    with contextlib.ExitStack() as stack:
        started = []
        for index in range(count):
            log = folder / f"replica-{index}.log"
            output = stack.enter_context(log.open("wb"))
            process = subprocess.Popen([*command, *flags], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
            stack.callback(process.kill)
            replica = Replica(process, log)
            stack.callback(replica.client.close)
            started.append(replica)
        for replica in started:
            wait_until(replica.listen, "a replica listens")
        for replica in started:
            wait_until(replica.is_ready, "a replica is ready")
        yield started
        for replica in started:
            if replica.process.poll() is None:
                replica.terminate()
        for replica in started:
            assert replica.process.wait(timeout=60) == 0, replica.log.read_text(encoding="utf-8")
