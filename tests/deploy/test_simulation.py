"""The simulation of deploy/scaling: the real scheduler, a made-up step time, results that can be worked out
by hand or must order themselves in a known way. ``python -m deploy.scaling check`` holds it against a real
server."""

from pathlib import Path

import pytest

from deploy.scaling.__main__ import build_parser
from deploy.scaling.capacity import capacity
from deploy.scaling.simulation import Outcome, Policy, simulate
from deploy.scaling.timing import Curve, Profile, StepTiming, keys_read
from deploy.scaling.workload import Demand, requests_of
from model.interface.kv_cache_spec import KVCacheSpec

NETWORK, HEAD = 0.010, 0.002  # seconds of a step, and for each sequence that gets a token


def made_up(
    max_num_seqs: int = 8, num_global_blocks: int = 513, max_num_batched_tokens: int = 128
) -> Profile:
    spec = KVCacheSpec(
        block_size=16,
        sliding_window=64,
        num_global_layers=1,
        num_local_layers=5,
        bytes_per_token_per_layer=64,
    )
    # 10 ms, and 0.1 ms more for each token; 2 ms for each sequence that gets a token.
    network = Curve((1, 129), (NETWORK + 0.0001, NETWORK + 0.0129))
    timing = StepTiming(network, Curve((0, 64), (0.0, 64 * HEAD)), key_read=0.0)
    num_local = 2 * spec.local_pool_blocks(max_num_seqs, max_num_batched_tokens)
    return Profile(
        "made up",
        "none",
        spec,
        num_global_blocks,
        num_local,
        max_num_seqs,
        max_num_batched_tokens,
        timing,
        0.001,
    )


def check_books(outcome: Outcome) -> None:
    requests = list(requests_of(outcome.demand))
    assert [times.num_output_tokens for times in outcome.times] == [
        request.output_tokens for request in requests
    ]
    assert all(
        times.arrival < times.first_token <= times.finished <= outcome.seconds for times in outcome.times
    )
    assert 0 < outcome.busy_share <= 1


def test_one_request_takes_its_steps_one_after_the_other() -> None:
    demand = Demand(1, clients=1, prompt_tokens=200, output_tokens=11)
    outcome = simulate(made_up(), 1, Policy.ROUND_ROBIN, demand)
    check_books(outcome)
    prefill = 0.001 + (NETWORK + 0.0128) + (NETWORK + 0.0072) + HEAD  # 128 tokens, then 72
    assert outcome.first_token_seconds(0.5) == pytest.approx(prefill)
    assert outcome.token_seconds(0.5) == pytest.approx(NETWORK + 0.0001 + HEAD)
    assert outcome.num_steps == 12
    assert outcome.busy_share == pytest.approx(1, abs=0.01)


def test_a_full_replica_comes_near_its_capacity_on_paper() -> None:
    profile = made_up()
    planned = capacity(profile, prompt_tokens=32, output_tokens=64)
    outcome = simulate(
        profile, 1, Policy.ROUND_ROBIN, Demand(160, clients=8, prompt_tokens=32, output_tokens=64)
    )
    check_books(outcome)
    # Requests of one length end together and prefill together, which the formula leaves out.
    assert outcome.requests_per_second == pytest.approx(planned.requests_per_second, rel=0.1)


def test_the_cache_limits_what_runs_at_once() -> None:
    profile = made_up(num_global_blocks=17)  # 256 tokens: two requests
    assert capacity(profile, prompt_tokens=64, output_tokens=64).sequences == 2
    outcome = simulate(
        profile, 1, Policy.ROUND_ROBIN, Demand(24, clients=8, prompt_tokens=64, output_tokens=64)
    )
    check_books(outcome)
    large = simulate(
        made_up(), 1, Policy.ROUND_ROBIN, Demand(24, clients=8, prompt_tokens=64, output_tokens=64)
    )
    assert outcome.output_tokens_per_second < 0.7 * large.output_tokens_per_second


@pytest.mark.parametrize("policy", list(Policy))
def test_replicas_multiply_the_throughput(policy: Policy) -> None:
    one = simulate(
        made_up(), 1, policy, Demand(60, clients=8, prompt_tokens=40, output_tokens=24, spread=0.5)
    )
    four = simulate(
        made_up(), 4, policy, Demand(240, clients=32, prompt_tokens=40, output_tokens=24, spread=0.5)
    )
    check_books(four)
    assert 3 < four.output_tokens_per_second / one.output_tokens_per_second <= 4.4


def test_the_same_demand_gives_the_same_outcome() -> None:
    demand = Demand(80, rate=40.0, prompt_tokens=40, output_tokens=16, spread=0.5, seed=3)
    first, second = (simulate(made_up(), 3, Policy.TWO_CHOICES, demand) for _ in range(2))
    assert first.times == second.times
    assert first.seconds == second.seconds


def test_fewer_wait_when_the_router_looks_at_the_load() -> None:
    profile = made_up(max_num_seqs=2)
    rate = 0.8 * 8 * capacity(profile, 64, 16).requests_per_second
    demand = Demand(400, rate=rate, prompt_tokens=64, output_tokens=16, spread=0.9, seed=1)
    blind, looking = (
        simulate(profile, 8, policy, demand) for policy in (Policy.ROUND_ROBIN, Policy.LEAST_REQUESTS)
    )
    assert looking.first_token_seconds(0.95) < blind.first_token_seconds(0.95)


def test_affinity_finds_more_in_the_caches() -> None:
    demand = Demand(400, clients=16, prompt_tokens=96, output_tokens=8, groups=32, shared_tokens=64, seed=2)
    blind, affine = (
        simulate(made_up(), 8, policy, demand) for policy in (Policy.ROUND_ROBIN, Policy.AFFINITY)
    )
    check_books(affine)
    assert affine.cached_share > 1.3 * blind.cached_share


def test_a_thousand_replicas() -> None:
    planned = capacity(made_up(), 32, 4)
    demand = Demand(1500, rate=500 * planned.requests_per_second, prompt_tokens=32, output_tokens=4)
    outcome = simulate(made_up(), 1000, Policy.LEAST_REQUESTS, demand)
    check_books(outcome)
    assert outcome.num_replicas == 1000


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    made_up().save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == made_up()
    (tmp_path / "other.json").write_text('{"model": "m"}', encoding="utf-8")
    with pytest.raises(ValueError, match="no profile"):
        Profile.load(tmp_path / "other.json")


def test_keys_read_are_those_of_both_kinds_of_layers() -> None:
    spec = made_up().spec
    assert keys_read(0, 3, spec) == 6 * (1 + 2 + 3)
    assert keys_read(999, 1, spec) == 1 * 1000 + 5 * 64


def test_a_curve_goes_on_beyond_its_ends() -> None:
    curve = Curve((1, 3, 5), (1.0, 2.0, 6.0))
    assert [curve.at(count) for count in (1, 2, 3, 4, 6)] == [1.0, 1.5, 2.0, 4.0, 8.0]
    with pytest.raises(ValueError, match="rise"):
        Curve((2, 1), (1.0, 2.0))


def test_the_command_prints_what_the_page_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.json"
    made_up().save(file)
    arguments = build_parser().parse_args(["capacity", str(file), "--cost-per-hour", "2"])
    assert arguments.run(arguments) == 0
    assert "per million output tokens" in capsys.readouterr().out
    arguments = build_parser().parse_args(["simulate", str(file), "--replicas", "1", "2", "--requests", "4"])
    assert arguments.run(arguments) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"rate": 1.0, "clients": 1},
        {"rate": 0.0},
        {"rate": 1.0, "spread": 1.0},
        {"clients": 1, "groups": 2},
    ],
)
def test_demands_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"rate|lengths|beginning"):
        Demand(1, **wrong)  # type: ignore[arg-type]
