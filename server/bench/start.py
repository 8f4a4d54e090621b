"""How long ``gemserve serve`` takes until it is ready: starts it again and again, each time in a new process,
waits until ``/health/ready`` answers 200, then sends requests one by one to see whether the first pays for
something put off."""

import re
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
import psutil

from server.settings.settings import SettingsError

POLL_SECONDS = 0.05  # each answer takes the interpreter from the load for a moment
START_TIMEOUT = 600.0
LATER_REQUESTS = 4
_LISTENING = re.compile(r'listening on (http://[^\s"]+)')  # in a line of text, or of JSON
_PHASE = re.compile(r'^gemserve_startup_duration_seconds\{phase="(\w+)"\} (\S+)$', re.MULTILINE)
_BODY = {"prompt": [2, *range(100, 115)], "max_tokens": 8, "ignore_eos": True, "temperature": 0}


@dataclass(frozen=True, slots=True)
class Start:
    listening_seconds: float  # since the process was started
    ready_seconds: float
    phases: dict[str, float]  # of the load, as the server measures them
    first_request_seconds: float
    later_request_seconds: float  # median
    peak_bytes: int  # most resident memory until ready

    def values(self) -> dict[str, object]:
        return {
            "listening_seconds": round(self.listening_seconds, 3),
            "ready_seconds": round(self.ready_seconds, 3),
            "phases": self.phases,
            "first_request_seconds": round(self.first_request_seconds, 4),
            "later_request_seconds": round(self.later_request_seconds, 4),
            "peak_bytes": self.peak_bytes,
        }


def measure_starts(
    count: int, arguments: str, progress: Callable[[str], None] = lambda line: None
) -> list[Start]:
    """``arguments``: more of them for ``gemserve serve``. Raises SettingsError when the server does not come
    up."""
    starts: list[Start] = []
    for _ in range(count):
        starts.append(measure_start(arguments))
        progress(f"start {len(starts)} of {count}: ready after {starts[-1].ready_seconds:.2f} s")
    return starts


def measure_start(arguments: str) -> Start:
    try:
        command = [
            sys.executable,
            "-m",
            "server",
            "serve",
            "--port",
            "0",
            *shlex.split(arguments),
            "--log-level",
            "info",
        ]
    except ValueError as error:
        raise SettingsError(f"--serve-arguments: {error}") from None
    began = time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        log = _Log(process)
        try:
            url = log.wait_for_address()
            listening = time.monotonic() - began
            with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
                while client.get("/health/ready").status_code != 200:
                    if time.monotonic() - began > START_TIMEOUT or process.poll() is not None:
                        raise SettingsError(f"bench: the server did not become ready: {log.tail()}")
                    time.sleep(POLL_SECONDS)
                ready = time.monotonic() - began
                peak = _peak_bytes(process.pid)
                requests = [_request_seconds(client) for _ in range(1 + LATER_REQUESTS)]
                phases = {
                    name: float(seconds) for name, seconds in _PHASE.findall(client.get("/metrics").text)
                }
        except httpx.HTTPError as error:
            raise SettingsError(f"bench: the server did not answer ({error}): {log.tail()}") from None
        finally:
            process.terminate()
            process.wait()
            log.close()
    return Start(listening, ready, phases, requests[0], statistics.median(requests[1:]), peak)


def _request_seconds(client: httpx.Client) -> float:
    began = time.monotonic()
    client.post("/v1/completions", json=_BODY).raise_for_status()
    return time.monotonic() - began


def _peak_bytes(pid: int) -> int:
    """The high-water mark of Linux; elsewhere what is resident now."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return int(psutil.Process(pid).memory_info().rss)


class _Log:
    """Reads what the server writes, so that it never waits for a reader."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: list[str] = []
        self._address: str | None = None
        self._known = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for_address(self) -> str:
        if not self._known.wait(START_TIMEOUT) or self._address is None:
            raise SettingsError(f"bench: the server does not listen: {self.tail()}")
        return self._address

    def tail(self) -> str:
        return " ".join(self._lines[-3:]).strip()[-1000:]

    def close(self) -> None:
        self._thread.join()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line)
            if self._address is None and (match := _LISTENING.search(line)):
                self._address = match[1]
                self._known.set()
        self._known.set()  # it has ended


def render_starts(starts: Sequence[Start]) -> str:
    """One line per start, then the medians."""

    def row(label: str, *values: float) -> str:
        listening, ready, first, later, peak = values
        return (
            f"{label:<8}{listening:>12.2f}{ready:>10.2f}"
            f"{first * 1e3:>16.0f}{later * 1e3:>18.0f}{peak / 2**20:>10.0f}"
        )

    def numbers(start: Start) -> tuple[float, ...]:
        seconds = (
            start.listening_seconds,
            start.ready_seconds,
            start.first_request_seconds,
            start.later_request_seconds,
        )
        return (*seconds, start.peak_bytes)

    heading = (
        f"{'start':<8}{'listening s':>12}{'ready s':>10}"
        f"{'first request ms':>16}{'later request ms':>18}{'peak MiB':>10}"
    )
    lines = [heading]
    lines += [row(str(index + 1), *numbers(start)) for index, start in enumerate(starts)]
    lines.append(row("median", *map(statistics.median, zip(*map(numbers, starts), strict=True))))
    phases = {
        name: statistics.median(start.phases.get(name, 0.0) for start in starts) for name in starts[-1].phases
    }
    lines.append(
        "phases of the load, median s: "
        + ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
    )
    return "\n".join(lines)
