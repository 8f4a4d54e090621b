"""Measuring a real model, the tiny one, and comparing a load with its simulation. How near the simulation
comes to a real server is for ``make scaling-check``, on a machine that does nothing else."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deploy.scaling.check import compare, drift, mean_of
from deploy.scaling.measure import Meter
from deploy.scaling.simulation import Outcome, Policy, RequestTimes, simulate
from deploy.scaling.timing import Curve, Profile
from deploy.scaling.workload import Demand
from server.bench.load import RequestResult
from server.bench.run import Measurement, Target
from server.settings.settings import Settings
from tests.deploy.test_simulation import check_books, made_up
from tests.tiny import write_tiny_folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = torch.get_num_threads()
    yield write_tiny_folder(tmp_path_factory.mktemp("tiny"))
    torch.set_num_threads(before)


def test_a_measured_profile_can_be_simulated(tiny: Path, tmp_path: Path) -> None:
    settings = Settings(
        model=str(tiny),
        dtype="float32",
        num_threads=1,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_memory=16 << 20,
    )
    profile = Meter(settings).profile()
    assert profile.timing.network.counts == (1, 2, 4, 8, 16, 32, 64)
    assert profile.timing.head.counts == (0, 1, 2, 4)
    # A difference of two times, so a busy machine can make one of them nothing.
    assert min(profile.timing.network.seconds) >= 0
    assert max(profile.timing.network.seconds) > 0
    assert profile.spec.sliding_window == 64
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    check_books(
        simulate(profile, 2, Policy.LEAST_REQUESTS, Demand(6, clients=3, prompt_tokens=70, output_tokens=5))
    )


def test_a_real_load_is_compared_by_its_means() -> None:
    measurement = Measurement(
        Target("server", "http://127.0.0.1:1"), 2, "tiny", prompt_tokens=8, wall_seconds=4.0
    )
    measurement.results += [RequestResult(1.0, 0.25, 5), RequestResult(2.0, 0.75, 5)]
    demand = Demand(2, clients=2, prompt_tokens=8, output_tokens=5)
    times = [RequestTimes(0.0, 1.5, 3.5, 5), RequestTimes(0.0, 1.5, 3.5, 5)]
    tokens, first, each = compare(measurement, Outcome(demand, 1, 5.0, times, 1.0, 0, 9))
    assert (tokens.real, tokens.simulated) == (2.5, 2.0)
    assert tokens.deviation == pytest.approx(-0.2)
    assert (first.real, first.simulated) == (1500, 1500)
    assert (each.real, each.simulated) == (500, 500)
    assert first.deviation == each.deviation == 0
    assert "-20.0%" in tokens.line()


def test_two_measurements_are_averaged_and_their_drift_is_told() -> None:
    first = made_up()
    network = first.timing.network
    slower = Curve(network.counts, tuple(1.2 * seconds for seconds in network.seconds))
    second = replace(first, timing=replace(first.timing, network=slower))
    assert drift(first, second) == pytest.approx(0.2)
    assert mean_of(first, second).timing.network.seconds == pytest.approx(
        [1.1 * seconds for seconds in network.seconds]
    )
