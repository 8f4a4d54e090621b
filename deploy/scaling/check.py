"""Holds the simulation against a real server on this machine: the steps are measured before and after, the
server is loaded by closed-loop clients in between, and the same load is simulated with the mean of both
measurements."""

import asyncio
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import httpx

from deploy.scaling.simulation import Outcome, Policy, simulate
from deploy.scaling.timing import Curve, Profile
from deploy.scaling.workload import Demand
from server.bench.load import Workload
from server.bench.run import Measurement, Target, measure

_LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")
START_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Comparison:
    what: str
    real: float
    simulated: float

    @property
    def deviation(self) -> float:
        return self.simulated / self.real - 1

    def line(self) -> str:
        return f"{self.what:<34}{self.real:>10.2f}{self.simulated:>12.2f}{self.deviation:>+10.1%}"


@contextlib.contextmanager
def served(flags: Sequence[str]) -> Iterator[str]:
    """The address of a ready ``gemserve serve`` with these arguments."""
    with tempfile.TemporaryDirectory(prefix="gemserve-scaling-") as folder:
        log = Path(folder) / "server.log"
        command = [sys.executable, "-m", "server", "serve", *flags, "--port", "0"]
        with (
            log.open("wb") as output,
            subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process,
        ):
            try:
                yield _address(process, log)
            finally:
                process.terminate()
                process.wait(timeout=60)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        text = log.read_text(encoding="utf-8")
        if process.poll() is not None:
            raise RuntimeError(f"the server has ended: {text[-1000:]}")
        found = _LISTENING.search(text)
        if found is not None:
            address = f"http://127.0.0.1:{found[1]}"
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{address}/health/ready").status_code == 200:
                    return address
        time.sleep(0.1)
    raise RuntimeError(f"the server is not ready after {START_SECONDS} seconds")


def mean_of(first: Profile, second: Profile) -> Profile:
    def mean(a: Curve, b: Curve) -> Curve:
        return Curve(a.counts, tuple((x + y) / 2 for x, y in zip(a.seconds, b.seconds, strict=True)))

    one, two = first.timing, second.timing
    timing = replace(
        one,
        network=mean(one.network, two.network),
        head=mean(one.head, two.head),
        key_read=(one.key_read + two.key_read) / 2,
    )
    return replace(first, timing=timing)


def drift(first: Profile, second: Profile) -> float:
    """How much the larger steps changed between the two measurements."""
    one, two = first.timing, second.timing
    pairs = [(one.network.seconds[-1], two.network.seconds[-1]), (one.head.seconds[-1], two.head.seconds[-1])]
    return max(abs(b / a - 1) for a, b in pairs)


def real_load(address: str, workload: Workload, clients: int, num_requests: int) -> Measurement:
    # no prompt is that of an earlier load, which the server's cache would hold
    own = replace(workload, seed=clients)
    (measurement,) = asyncio.run(
        measure(
            [Target("server", address)], own, concurrencies=[clients], num_requests=num_requests, num_warmup=1
        )
    )
    if measurement.num_errors:
        raise RuntimeError(f"the real server failed: {measurement.errors[0]}")
    return measurement


def compare(measurement: Measurement, outcome: Outcome) -> list[Comparison]:
    """Means: a few requests fall into groups, those that met others' prefills and those that did not, and a
    median is one or the other."""
    clients, results, times = measurement.concurrency, measurement.succeeded, outcome.times
    first = fmean(result.time_to_first_token for result in results)
    each = fmean(result.time_per_output_token or 0.0 for result in results)
    simulated_first = fmean(t.first_token - t.arrival for t in times)
    simulated_each = fmean((t.finished - t.first_token) / max(1, t.num_output_tokens - 1) for t in times)
    return [
        Comparison(
            f"{clients} clients: output tokens/s",
            measurement.output_tokens_per_second,
            outcome.output_tokens_per_second,
        ),
        Comparison(f"{clients} clients: first token, ms", 1e3 * first, 1e3 * simulated_first),
        Comparison(f"{clients} clients: each token, ms", 1e3 * each, 1e3 * simulated_each),
    ]


def check(
    profile_now: Callable[[], Profile],
    flags: Sequence[str],
    loads: Sequence[tuple[int, int]],
    workload: Workload,
) -> tuple[list[Comparison], float]:
    """Comparisons for each (clients, requests) of ``loads``, and the drift of the machine meanwhile."""
    before = profile_now()
    with served(flags) as address:
        measurements = [
            real_load(address, workload, clients, num_requests) for clients, num_requests in loads
        ]
    after = profile_now()
    profile = mean_of(before, after)
    comparisons: list[Comparison] = []
    for (clients, num_requests), measurement in zip(loads, measurements, strict=True):
        demand = Demand(
            num_requests,
            clients=clients,
            prompt_tokens=workload.prompt_tokens,
            output_tokens=workload.output_tokens,
        )
        comparisons += compare(measurement, simulate(profile, 1, Policy.ROUND_ROBIN, demand))
    return comparisons, drift(before, after)
