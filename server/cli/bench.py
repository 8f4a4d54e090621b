"""``gemserve bench``: closed-loop streaming load on OpenAI-style servers, or our own starts and engine; all
in server/bench."""

import argparse
from typing import TYPE_CHECKING

from server.cli.common import add_command

if TYPE_CHECKING:
    from server.cli.common import Subparsers


def add_parser(commands: "Subparsers") -> None:
    parser = add_command(
        commands, "bench", "measure OpenAI-style servers under closed-loop streaming load", run
    )
    parser.add_argument(
        "url", nargs="?", metavar="URL", help="Server to measure, such as http://127.0.0.1:8000."
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="NAME=URL",
        help="Servers to measure in one run, taking turns; the first is the base of the ratios.",
    )
    parser.add_argument(
        "--constrained",
        action="store_true",
        help="Send each round twice, free and with a JSON schema that can't end before --output-tokens; "
        "the ratio is the cost.",
    )
    parser.add_argument(
        "--start",
        type=int,
        metavar="N",
        help="Instead of a load: start a server N times, and measure how long it takes until ready.",
    )
    parser.add_argument(
        "--engine-overhead",
        type=int,
        metavar="STEPS",
        help="Instead of a load: time what so many decode steps of --concurrency sequences, whose contexts "
        "reach up to --prompt-tokens, cost the host with a device that takes no time.",
    )
    parser.add_argument(
        "--front-end",
        type=int,
        metavar="ROUNDS",
        help="Instead of a load: stream --concurrency answers at a time from a server whose model takes no "
        "time; tokens per second, and what each costs the server's processor.",
    )
    parser.add_argument(
        "--serve-arguments",
        default="",
        metavar="TEXT",
        help="With --start: more arguments for 'gemserve serve'.",
    )
    parser.add_argument(
        "--model", help="Model name to ask for. Default: the first one that the server lists."
    )
    parser.add_argument("--api-key", metavar="KEY", help="Bearer token to send.")
    add = parser.add_argument
    add(
        "--concurrency",
        type=int,
        nargs="+",
        default=[8],
        metavar="N",
        help="Requests in flight; several run in turn. Default: 8.",
    )
    add(
        "--requests",
        type=int,
        default=32,
        metavar="N",
        help="Requests per concurrency, rounded over the rounds. Default: 32.",
    )
    add(
        "--rounds",
        type=int,
        default=1,
        metavar="N",
        help="Rounds in which the requests are sent; servers alternate. Default: 1.",
    )
    add(
        "--prompt-tokens",
        type=int,
        default=128,
        metavar="N",
        help="Tokens of each prompt, BOS included. Default: 128.",
    )
    add(
        "--output-tokens",
        type=int,
        default=128,
        metavar="N",
        help="Tokens to generate per request. Default: 128.",
    )
    add(
        "--shared-prefix",
        type=int,
        default=0,
        metavar="N",
        help="Tokens that all prompts begin with. Default: 0.",
    )
    add("--temperature", type=float, default=0.0, help="Sampling temperature. Default: 0.")
    add("--top-p", type=float, default=None, metavar="P", help="Nucleus to send. Default: not sent.")
    add("--seed", type=int, default=0, help="Seed of the random prompts. Default: 0.")
    add(
        "--warmup",
        type=int,
        default=1,
        metavar="N",
        help="Requests before the clock starts, per server. Default: 1.",
    )
    add(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="Longest wait for one request. Default: 600.",
    )
    add("--json", action="store_true", help="Print one JSON object instead of the table.")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 when any request failed, so that a script notices."""
    import asyncio
    import json
    import sys

    from server.bench.load import Workload, constraint
    from server.bench.report import render_table, result_values
    from server.bench.run import Target, measure
    from server.settings.settings import SettingsError

    if arguments.start is not None:
        return _run_starts(arguments)
    if arguments.engine_overhead is not None:
        return _run_engine_overhead(arguments)
    if arguments.front_end is not None:
        return _run_front_end(arguments)
    if bool(arguments.url) == bool(arguments.compare):
        raise SettingsError("bench: give either one URL or --compare NAME=URL NAME=URL")
    targets = [Target.parse(text) for text in arguments.compare or [f"server={arguments.url}"]]
    if arguments.constrained:
        if arguments.compare:
            raise SettingsError(
                "bench: --constrained compares one server with itself; give one URL, not --compare"
            )
        url = targets[0].url
        targets = [Target("free", url), Target("constrained", url, constraint(arguments.output_tokens))]
    if len({target.name for target in targets}) != len(targets):
        raise SettingsError("--compare: every server needs a name of its own")
    if (
        min(arguments.concurrency) < 1
        or arguments.requests < 1
        or arguments.rounds < 1
        or arguments.warmup < 0
    ):
        raise SettingsError(
            "bench: --concurrency, --requests and --rounds must be at least 1, --warmup at least 0"
        )
    workload = Workload(
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        shared_prefix=arguments.shared_prefix,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    results = asyncio.run(
        measure(
            targets,
            workload,
            concurrencies=arguments.concurrency,
            num_requests=arguments.requests,
            num_rounds=arguments.rounds,
            num_warmup=arguments.warmup,
            model=arguments.model,
            api_key=arguments.api_key,
            request_timeout=arguments.timeout,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    )
    if arguments.json:
        print(json.dumps({"workload": workload.values(), "results": result_values(results)}, indent=2))
    else:
        print(render_table(results))
    return 1 if any(result.num_errors for result in results) else 0


def _run_starts(arguments: argparse.Namespace) -> int:
    import json
    import sys

    from server.bench.start import measure_starts, render_starts
    from server.settings.settings import SettingsError

    if arguments.start < 1 or arguments.url or arguments.compare:
        raise SettingsError("bench: --start takes a number from 1 on, and neither a URL nor --compare")
    starts = measure_starts(
        arguments.start,
        arguments.serve_arguments,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(
        json.dumps([start.values() for start in starts], indent=2)
        if arguments.json
        else render_starts(starts)
    )
    return 0


def _run_engine_overhead(arguments: argparse.Namespace) -> int:
    from server.bench.engine_overhead import measure_overhead, render
    from server.settings.settings import SettingsError

    if arguments.engine_overhead < 1 or arguments.url or arguments.compare:
        raise SettingsError(
            "bench: --engine-overhead takes a number from 1 on, and neither a URL nor --compare"
        )
    if min(arguments.concurrency) < 1 or arguments.prompt_tokens < 1:
        raise SettingsError("bench: --concurrency and --prompt-tokens must be at least 1")
    longest, temperature = arguments.prompt_tokens, arguments.temperature
    for num_seqs in arguments.concurrency:
        print(
            render(
                measure_overhead(num_seqs, longest, arguments.engine_overhead, temperature),
                num_seqs,
                longest,
                temperature,
            )
        )
    return 0


def _run_front_end(arguments: argparse.Namespace) -> int:
    import json
    import sys

    from server.bench.front_end import measure_front_end, render_rounds
    from server.bench.load import Workload
    from server.settings.settings import SettingsError

    if arguments.front_end < 1 or arguments.url or arguments.compare:
        raise SettingsError("bench: --front-end takes a number from 1 on, and neither a URL nor --compare")
    if min(arguments.concurrency) < 1:
        raise SettingsError("bench: --concurrency must be at least 1")
    workload = Workload(
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        shared_prefix=arguments.shared_prefix,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    measured = []
    for num_streams in arguments.concurrency:
        rounds = measure_front_end(
            num_streams,
            arguments.front_end,
            workload,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
        measured += rounds
        if not arguments.json:
            print(render_rounds(rounds))
    if arguments.json:
        print(json.dumps([one.values() for one in measured], indent=2))
    return 0
