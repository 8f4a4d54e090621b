"""``gemserve run-batch``: answers the requests of an OpenAI batch file, with a model loaded for it or on a
server. A run that was ended goes on where it stopped."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from server.cli.common import add_command, settings_of
from server.settings.settings import SettingsError, add_arguments

if TYPE_CHECKING:
    import httpx

    from server.batch.files import BatchInput, BatchOutput
    from server.batch.run import BatchResult
    from server.cli.common import Subparsers
    from server.settings.settings import Settings

LOCAL_SETTINGS = (
    "model",
    "served_model_name",
    "dtype",
    "quantization",
    "device",
    "num_threads",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "scheduling_policy",
    "block_size",
    "kv_cache_memory",
    "gpu_memory_utilization",
    "cuda_graphs",
    "async_scheduling",
    "prefix_caching",
    "chat_template",
    "strict_params",
    "strict_roles",
    "strict_context",
    "cache_dir",
    "weight_cache",
    "step_timeout",
    "debug_invariants",
)
DEFAULT_REMOTE_CONCURRENCY = 32


def add_parser(commands: "Subparsers") -> None:
    parser = add_command(commands, "run-batch", "answer the requests of an OpenAI batch file", run)
    add = parser.add_argument
    add(
        "-i",
        "--input-file",
        type=Path,
        required=True,
        metavar="FILE",
        help="Requests, one JSON object per line.",
    )
    add(
        "-o",
        "--output-file",
        type=Path,
        required=True,
        metavar="FILE",
        help="Answers, one per line as they come; requests that have one there are not sent again.",
    )
    add("--url", metavar="URL", help="Send them to this server instead of loading a model.")
    add("--api-key", dest="url_api_key", metavar="KEY", help="Bearer token for --url.")
    add(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="Longest wait for one answer of --url. Default: 600.",
    )
    add(
        "--concurrency",
        type=int,
        metavar="N",
        help=f"Requests at a time. Default: {DEFAULT_REMOTE_CONCURRENCY} for --url, "
        "else twice --max-num-seqs.",
    )
    add_arguments(parser, LOCAL_SETTINGS)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 when a request failed, so that a script notices."""
    import asyncio
    import logging
    import sys

    from server.batch.files import BatchInput, BatchOutput
    from server.engine.request import EngineHungError

    if arguments.concurrency is not None and arguments.concurrency < 1:
        raise SettingsError("--concurrency: expected at least 1")
    if arguments.timeout <= 0:
        raise SettingsError("--timeout: expected more than 0 seconds")
    if arguments.url is not None and getattr(arguments, "model", None) is not None:
        raise SettingsError("run-batch: give either MODEL or --url")
    settings = settings_of(arguments)
    logging.basicConfig(
        level="WARNING", format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    batch = BatchInput(arguments.input_file)
    if arguments.input_file.resolve() == arguments.output_file.resolve():
        raise SettingsError("--output-file: it is the input file")
    with BatchOutput(arguments.output_file, batch) as output:
        try:
            result = asyncio.run(_answer(arguments, settings, batch, output))
        except KeyboardInterrupt:
            print(
                f"gemserve: {len(output.done)} requests are answered; run the same command again to go on",
                file=sys.stderr,
            )
            _exit_at_once(130)
        except EngineHungError as error:
            print(f"gemserve: error: {error}", file=sys.stderr)
            _exit_at_once(1)
    print(
        f"gemserve: {len(batch.custom_ids)} requests: {result.num_succeeded} succeeded, {result.num_failed} "
        f"failed, {result.num_before} were answered before; {result.prompt_tokens} prompt tokens, "
        f"{result.completion_tokens} generated tokens",
        file=sys.stderr,
    )
    return 1 if result.num_failed else 0


def _exit_at_once(code: int) -> NoReturn:
    """The answers are in their file; a thread in native code, of a load or of a step that hangs, is not
    waited for."""
    from server.cli.serving import exit_at_once

    exit_at_once(code)


async def _answer(
    arguments: argparse.Namespace, settings: "Settings", batch: "BatchInput", output: "BatchOutput"
) -> "BatchResult":
    from server.batch.run import BatchResult

    if len(output.done) == len(batch.custom_ids):
        return BatchResult(num_before=len(output.done))
    if arguments.url is None:
        import sys

        from server.batch.local import local_client
        from server.cli.serving import TERMS

        print(TERMS, file=sys.stderr, flush=True)
        async with local_client(settings) as client:
            return await _with_progress(
                client, batch, output, arguments.concurrency or 2 * settings.max_num_seqs
            )
    async with remote_client(arguments.url, arguments.url_api_key, arguments.timeout) as client:
        return await _with_progress(
            client, batch, output, arguments.concurrency or DEFAULT_REMOTE_CONCURRENCY
        )


def remote_client(url: str, api_key: str | None, timeout: float) -> "httpx.AsyncClient":
    from urllib.parse import urlsplit

    import httpx

    if urlsplit(url).scheme not in ("http", "https"):
        raise SettingsError(f"--url: expected an address such as http://127.0.0.1:8000, got {url!r}")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    base_url = url.rstrip("/").removesuffix("/v1")
    return httpx.AsyncClient(
        base_url=base_url, timeout=timeout, limits=limits, headers=headers, trust_env=False
    )


async def _with_progress(
    client: "httpx.AsyncClient", batch: "BatchInput", output: "BatchOutput", concurrency: int
) -> "BatchResult":
    import sys

    from tqdm import tqdm

    from server.batch.run import run_batch

    # On a terminal a bar; in a log, a line now and then.
    interval = 0.2 if sys.stderr.isatty() else 10.0
    total, before = len(batch.custom_ids), len(output.done)
    with tqdm(
        total=total, initial=before, desc="Requests", unit="request", mininterval=interval, file=sys.stderr
    ) as bar:

        def progress(result: "BatchResult") -> None:
            if result.num_failed:
                bar.set_postfix(failed=result.num_failed, refresh=False)
            bar.update(before + result.num_succeeded + result.num_failed - bar.n)

        return await run_batch(client, batch, output, concurrency=concurrency, progress=progress)
