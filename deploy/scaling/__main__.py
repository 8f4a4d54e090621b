"""``python -m deploy.scaling``: measure a model's steps on this machine, work out a replica's capacity from
them, simulate replicas behind a router, or hold the simulation against a real server."""

import argparse
import sys
from pathlib import Path

from deploy.scaling.capacity import capacity
from deploy.scaling.simulation import Policy, simulate
from deploy.scaling.timing import Profile
from deploy.scaling.workload import Demand
from model.interface.errors import ModelError
from server.loading.threads import configure_threads
from server.settings.settings import add_arguments, load_settings

SETTINGS = (
    "model",
    "dtype",
    "quantization",
    "device",
    "num_threads",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "block_size",
    "kv_cache_memory",
    "gpu_memory_utilization",
    "cuda_graphs",
    "cache_dir",
)
MOST_DEVIATION = 0.15


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.scaling", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    measured = commands.add_parser("measure", help="write a profile of a model on this machine")
    measured.add_argument("--output", type=Path, required=True, metavar="FILE", help="profile to write")
    add_arguments(measured, SETTINGS)
    measured.set_defaults(run=run_measure)

    planned = commands.add_parser("capacity", help="requests, tokens and cost of one replica")
    _add_profile(planned)
    planned.add_argument(
        "--cached-tokens", type=int, default=0, metavar="N", help="of each prompt, in the prefix cache"
    )
    planned.add_argument(
        "--cost-per-hour", type=float, default=0.0, metavar="COST", help="of one replica, in any currency"
    )
    planned.set_defaults(run=run_capacity)

    simulated = commands.add_parser("simulate", help="replicas behind a router")
    _add_profile(simulated)
    add = simulated.add_argument
    add("--replicas", type=int, nargs="+", default=[1, 10, 100], metavar="N", help="one simulation for each")
    add(
        "--policy",
        type=Policy,
        nargs="+",
        default=[Policy.LEAST_REQUESTS],
        choices=list(Policy),
        help="one for each",
    )
    add(
        "--load",
        type=float,
        default=0.8,
        metavar="SHARE",
        help="requests per second, as a share of the capacity on paper",
    )
    add("--requests", type=int, default=100, metavar="N", help="for each replica")
    add("--spread", type=float, default=0.5, metavar="SHARE", help="of lengths around their mean")
    add(
        "--groups",
        type=int,
        default=0,
        metavar="N",
        help="groups, for each replica, whose prompts begin alike",
    )
    add("--shared-tokens", type=int, default=0, metavar="N", help="with which they begin")
    add("--seed", type=int, default=0)
    simulated.set_defaults(run=run_simulate)

    checked = commands.add_parser("check", help="the simulation against a real server on this machine")
    checked.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16], metavar="N")
    checked.add_argument("--requests", type=int, default=4, metavar="N", help="for each client")
    checked.add_argument("--prompt-tokens", type=int, default=128, metavar="N")
    checked.add_argument("--output-tokens", type=int, default=32, metavar="N")
    add_arguments(checked, SETTINGS)
    checked.set_defaults(run=run_check)
    return parser


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", type=Path, metavar="PROFILE", help="file that measure has written")
    parser.add_argument("--prompt-tokens", type=int, default=512, metavar="N")
    parser.add_argument("--output-tokens", type=int, default=128, metavar="N")


def run_measure(arguments: argparse.Namespace) -> int:
    from deploy.scaling.measure import Meter

    Meter(load_settings(vars(arguments))).profile().save(arguments.output)
    return 0


def run_capacity(arguments: argparse.Namespace) -> int:
    profile = Profile.load(arguments.profile)
    planned = capacity(profile, arguments.prompt_tokens, arguments.output_tokens, arguments.cached_tokens)
    rows = [
        ("model", f"{profile.model} on {profile.machine}"),
        (
            "requests",
            f"{planned.prompt_tokens} tokens in, {planned.output_tokens} out; "
            f"{planned.sequences} run at once",
        ),
        ("cache", f"{profile.capacity_tokens:,} tokens: room for {planned.sequences_in_cache} such requests"),
        ("requests/s", f"{planned.requests_per_second:.3f}"),
        ("output tokens/s", f"{planned.output_tokens_per_second:.1f}"),
        ("all tokens/s", f"{planned.all_tokens_per_second:.1f}"),
        ("between tokens", f"{1e3 * planned.token_seconds:.0f} ms"),
    ]
    if arguments.cost_per_hour:
        rows.append(("per million output tokens", f"{planned.cost_per_million(arguments.cost_per_hour):.2f}"))
    print("\n".join(f"{name:<27}{value}" for name, value in rows))
    return 0


def run_simulate(arguments: argparse.Namespace) -> int:
    profile = Profile.load(arguments.profile)
    cached = arguments.shared_tokens if arguments.groups else 0
    planned = capacity(profile, arguments.prompt_tokens, arguments.output_tokens, cached)
    columns = (
        ("replicas", 8),
        ("policy", -14),
        ("requests/s", 10),
        ("out tok/s", 10),
        ("busy", 6),
        ("cached", 7),
        ("TTFT p50", 9),
        ("p95", 7),
        ("p99 s", 7),
        ("token ms", 8),
        ("steps", 9),
    )
    print(" ".join(name.ljust(-width) if width < 0 else name.rjust(width) for name, width in columns))
    for count in arguments.replicas:
        demand = Demand(
            num_requests=arguments.requests * count,
            rate=arguments.load * planned.requests_per_second * count,
            prompt_tokens=arguments.prompt_tokens,
            output_tokens=arguments.output_tokens,
            spread=arguments.spread,
            groups=arguments.groups * count,
            shared_tokens=arguments.shared_tokens,
            seed=arguments.seed,
        )
        for policy in arguments.policy:
            outcome = simulate(profile, count, policy, demand)
            first = [outcome.first_token_seconds(quantile) for quantile in (0.5, 0.95, 0.99)]
            print(
                f"{count:>8} {policy:<14} {outcome.requests_per_second:>10.2f} "
                f"{outcome.output_tokens_per_second:>10.1f} {outcome.busy_share:>6.0%} "
                f"{outcome.cached_share:>7.0%} {first[0]:>9.2f} {first[1]:>7.2f} {first[2]:>7.2f} "
                f"{1e3 * outcome.token_seconds(0.5):>8.0f} {outcome.num_steps:>9,}",
                flush=True,
            )
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    """Exit code 1 when a figure is more than 15 % off."""
    from deploy.scaling.check import check
    from deploy.scaling.measure import Meter
    from server.bench.load import Workload

    given = vars(arguments)
    flags = [str(given["model"])] if given.get("model") else []
    for name in SETTINGS[1:]:
        if given.get(name) is not None:
            flags += ["--" + name.replace("_", "-"), str(given[name])]
    workload = Workload(prompt_tokens=arguments.prompt_tokens, output_tokens=arguments.output_tokens)
    loads = [(clients, clients * arguments.requests) for clients in arguments.clients]
    comparisons, drift = check(lambda: Meter(load_settings(given)).profile(), flags, loads, workload)
    print(f"{'':<34}{'real':>10}{'simulated':>12}{'':>10}")
    print("\n".join(comparison.line() for comparison in comparisons))
    print(f"the machine's own speed changed by {drift:.1%} meanwhile")
    return int(any(abs(comparison.deviation) > MOST_DEVIATION for comparison in comparisons))


def main() -> int:
    arguments = build_parser().parse_args()
    configure_threads()  # as the server does
    try:
        run: int = arguments.run(arguments)
    except (ModelError, ValueError) as error:
        print(f"scaling: {error}", file=sys.stderr)
        return 1
    return run


if __name__ == "__main__":
    sys.exit(main())
