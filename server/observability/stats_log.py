"""One line of statistics every few seconds while the engine has work, for those who watch the log and no
dashboard."""

import logging
import time
from asyncio import sleep
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import Counter

from server.engine.async_engine import AsyncEngine
from server.observability.engine_metrics import waiting_sequences
from server.observability.logs import with_fields
from server.observability.metrics import Metrics

logger = logging.getLogger("gemserve.stats")


class EngineOwner(Protocol):
    @property
    def engine(self) -> AsyncEngine | None: ...


@dataclass(frozen=True, slots=True)
class _Totals:
    """Counters at a moment."""

    at: float
    steps: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0


async def log_stats(owner: EngineOwner, metrics: Metrics, interval: float) -> None:
    """Runs until cancelled. A line covers the time since the one before, or since the last idle interval."""
    before = _Totals(time.monotonic())
    while True:
        await sleep(interval)
        engine = owner.engine
        if engine is None:
            before = _Totals(time.monotonic())
            continue
        now = _totals(engine, metrics)
        if now.steps > before.steps or engine.stats.num_running or waiting_sequences(engine)[0]:
            _log(engine, before, now)
        before = now


def _totals(engine: AsyncEngine, metrics: Metrics) -> _Totals:
    stats = engine.stats
    return _Totals(
        time.monotonic(),
        sum(stats.steps_total.values()),
        stats.prefill_tokens_total,
        _value(metrics.generation_tokens),
        stats.prefix_queried_tokens_total,
        stats.prefix_hit_tokens_total,
        stats.preemptions_total,
    )


def _value(counter: Counter) -> int:
    return int(sum(sample.value for family in counter.collect() for sample in family.samples))


def _log(engine: AsyncEngine, before: _Totals, now: _Totals) -> None:
    seconds = now.at - before.at
    num_waiting, _ = waiting_sequences(engine)
    queried = now.queried_tokens - before.queried_tokens
    hits = (now.hit_tokens - before.hit_tokens) / queried if queried else 0.0
    usage = engine.stats.pools["global"].usage_ratio
    prefill_rate = (now.prefill_tokens - before.prefill_tokens) / seconds
    generation_rate = (now.generated_tokens - before.generated_tokens) / seconds
    preemptions = now.preemptions - before.preemptions
    logger.info(
        "running=%d waiting=%d prefill=%.1f tokens/s generation=%.1f tokens/s kv_cache=%.1f%% "
        "prefix_hits=%.1f%% preemptions=%d",
        engine.stats.num_running,
        num_waiting,
        prefill_rate,
        generation_rate,
        100 * usage,
        100 * hits,
        preemptions,
        extra=with_fields(
            running=engine.stats.num_running,
            waiting=num_waiting,
            prefill_tokens_per_second=round(prefill_rate, 1),
            generated_tokens_per_second=round(generation_rate, 1),
            kv_cache_usage_ratio=round(usage, 4),
            prefix_hit_ratio=round(hits, 4),
            preemptions=preemptions,
        ),
    )
