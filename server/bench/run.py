"""The closed loop: so many workers, each sending its next request when the last one ended. Several servers
take turns round by round, so that what changes on the machine meanwhile meets all of them alike."""

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from server.bench.engine_share import EngineSeconds, engine_seconds
from server.bench.load import RequestResult, Workload, send
from server.settings.settings import SettingsError

COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Target:
    """One server, and what its requests have beyond those of the workload."""

    name: str
    url: str
    fields: Mapping[str, object] = field(default_factory=dict, hash=False)

    @classmethod
    def parse(cls, text: str) -> "Target":
        name, _, url = text.partition("=")
        if not name or urlsplit(url).scheme not in ("http", "https"):
            raise SettingsError(
                f"bench: expected an address such as http://127.0.0.1:8000, got {url or text!r}"
            )
        return cls(name, url.rstrip("/").removesuffix("/v1"))


@dataclass(slots=True)
class Measurement:
    """Results of one server at one concurrency. ``wall_seconds`` adds up its own rounds only."""

    target: Target
    concurrency: int
    model: str
    prompt_tokens: int
    wall_seconds: float = 0.0
    results: list[RequestResult] = field(default_factory=list)
    engine: EngineSeconds | None = None  # of its own rounds; None for servers that do not tell

    @property
    def outside_model(self) -> float | None:
        """Share of the wall time in which the server's model did not run."""
        return None if self.engine is None else self.engine.outside_model(self.wall_seconds)

    @property
    def succeeded(self) -> list[RequestResult]:
        return [result for result in self.results if result.error is None]

    @property
    def errors(self) -> list[str]:
        return [result.error for result in self.results if result.error is not None]

    @property
    def num_errors(self) -> int:
        return len(self.errors)

    @property
    def output_tokens_per_second(self) -> float:
        return sum(result.num_output_tokens for result in self.succeeded) / self.wall_seconds

    @property
    def requests_per_second(self) -> float:
        return len(self.succeeded) / self.wall_seconds

    def ttft_ms(self) -> tuple[float, float] | None:
        return _median_and_p95([result.time_to_first_token for result in self.succeeded])

    def tpot_ms(self) -> tuple[float, float] | None:
        times = [result.time_per_output_token for result in self.succeeded]
        return _median_and_p95([value for value in times if value is not None])


def _median_and_p95(seconds: Sequence[float]) -> tuple[float, float] | None:
    """In milliseconds; the 95th percentile by the nearest rank."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return statistics.median(ordered) * 1e3, ordered[max(0, -(-95 * len(ordered) // 100) - 1)] * 1e3


async def measure(
    targets: Sequence[Target],
    workload: Workload,
    *,
    concurrencies: Sequence[int],
    num_requests: int,
    num_rounds: int = 1,
    num_warmup: int = 1,
    model: str | None = None,
    api_key: str | None = None,
    request_timeout: float = 600.0,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Measurement]:
    """One measurement per concurrency and target. Every server gets the same prompts in the same order, each
    prompt once; targets on one server have prompts of their own, so that none finds another's in the
    cache."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        timeout=request_timeout, limits=limits, headers=headers, trust_env=False
    ) as client:
        models = {target: model or await _first_model(client, target) for target in targets}
        prompts = workload.prompts()
        shares_server = len({target.url for target in targets}) < len(targets)
        warm_up = list(itertools.islice(prompts, num_warmup))
        for target in targets:
            for prompt in warm_up:
                await send(
                    client,
                    target.url + COMPLETIONS,
                    {**workload.body(models[target], prompt), **target.fields},
                )
        measurements: list[Measurement] = []
        for concurrency in concurrencies:
            row = [
                Measurement(target, concurrency, models[target], workload.prompt_tokens) for target in targets
            ]
            measurements += row
            for index in range(num_rounds):
                count = max(1, num_requests * (index + 1) // num_rounds - num_requests * index // num_rounds)
                batches = [list(itertools.islice(prompts, count))] * len(row)
                if shares_server:
                    batches[1:] = [list(itertools.islice(prompts, count)) for _ in row[1:]]
                turns = list(zip(row, batches, strict=True))
                # The order turns round by round: whoever goes first meets a cooler machine.
                for measurement, batch in turns if index % 2 == 0 else reversed(turns):
                    target = measurement.target
                    bodies = [
                        {**workload.body(measurement.model, prompt), **target.fields} for prompt in batch
                    ]
                    before = await engine_seconds(client, measurement.target.url)
                    started = time.perf_counter()
                    measurement.results += await _closed_loop(client, measurement, bodies)
                    measurement.wall_seconds += time.perf_counter() - started
                    after = await engine_seconds(client, measurement.target.url)
                    if before is not None and after is not None:
                        spent = after.since(before)
                        measurement.engine = (
                            spent if measurement.engine is None else measurement.engine + spent
                        )
                    progress(
                        f"{measurement.target.name}: concurrency {concurrency}, round {index + 1} of "
                        f"{num_rounds} done"
                    )
        return measurements


async def _closed_loop(
    client: httpx.AsyncClient, measurement: Measurement, bodies: Iterable[dict[str, object]]
) -> list[RequestResult]:
    queue = iter(bodies)
    results: list[RequestResult] = []

    async def worker() -> None:
        for body in queue:
            result = await send(client, measurement.target.url + COMPLETIONS, body)
            results.append(result)

    async with asyncio.TaskGroup() as group:
        for _ in range(measurement.concurrency):
            group.create_task(worker())
    return results


async def _first_model(client: httpx.AsyncClient, target: Target) -> str:
    try:
        response = await client.get(target.url + "/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise SettingsError(
            f"{target.url} lists no models ({error or type(error).__name__}); give --model"
        ) from None
