"""Metrics of the engine, read from its plain statistics when scraped: a scrape never waits for the engine,
and gauges are right while nothing runs."""

import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.engine.async_engine import AsyncEngine
from server.engine.stats import EngineStats, SpeculationStats


class EngineView(Protocol):
    """What a scrape sees of the server's state; without an engine everything reads zero."""

    @property
    def engine(self) -> AsyncEngine | None: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def is_draining(self) -> bool: ...
    @property
    def queue_limit(self) -> int: ...
    @property
    def info(self) -> Mapping[str, Mapping[str, str]]: ...
    @property
    def startup_seconds(self) -> Mapping[str, float]: ...
    @property
    def memory_bytes(self) -> Mapping[str, int]: ...


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"gemserve_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"gemserve_{name}", text, value=value)


def _labelled(family: Any, rows: Mapping[tuple[str, ...], float]) -> Metric:
    for labels, value in rows.items():
        family.add_metric(labels, value)
    assert isinstance(family, Metric)
    return family


class EngineCollector(Collector):
    def __init__(self, view: EngineView) -> None:
        self._view = view

    def describe(self) -> list[Metric]:
        return []  # registering must not look at an engine that is not there yet

    def collect(self) -> Iterator[Metric]:
        view = self._view
        engine = view.engine
        stats = EngineStats() if engine is None else engine.stats
        # In this order, since a signal may come between the two: a server that drains is never said to be
        # ready.
        yield _gauge("draining", "1 while shutting down.", float(view.is_draining))
        yield _gauge("ready", "1 while requests are served.", float(view.is_ready))
        yield from self._infos()
        yield _gauge(
            "queue_limit_requests",
            "Sequences that may wait besides those that can run; 0: no limit.",
            view.queue_limit,
        )
        yield from _queue(engine, stats)
        yield from _work(stats)
        yield from _cache(stats)
        yield from _speculation(stats.speculation)
        memory = GaugeMetricFamily(
            "gemserve_memory_bytes", "Memory by what it holds, as of the last step.", labels=["kind"]
        )
        yield _labelled(memory, {(kind,): float(size) for kind, size in view.memory_bytes.items()})

    def _infos(self) -> Iterator[Metric]:
        for name, labels in self._view.info.items():
            family = GaugeMetricFamily(f"gemserve_{name}", "Always 1.", labels=list(labels))
            yield _labelled(family, {tuple(labels.values()): 1.0})
        startup = GaugeMetricFamily(
            "gemserve_startup_duration_seconds", "Duration of the start's phases.", labels=["phase"]
        )
        yield _labelled(startup, {(phase,): seconds for phase, seconds in self._view.startup_seconds.items()})


def waiting_sequences(engine: AsyncEngine) -> tuple[int, float]:
    """How many sequences wait, and the age of the oldest in seconds; with those that the engine's thread has
    not seen yet."""
    stats, arrivals = engine.stats, engine.arrivals_in_inbox()
    oldest = min((at for at in (stats.oldest_waiting_arrival, *arrivals) if at is not None), default=None)
    age = 0.0 if oldest is None else max(0.0, time.monotonic() - oldest)
    return stats.num_waiting + len(arrivals), age


def _queue(engine: AsyncEngine | None, stats: EngineStats) -> Iterator[Metric]:
    num_waiting, age = (0, 0.0) if engine is None else waiting_sequences(engine)
    running_limit = 0 if engine is None else engine.limits.max_num_seqs
    yield _gauge("requests_running", "Sequences that are running.", stats.num_running)
    yield _gauge("requests_waiting", "Sequences that wait for admission.", num_waiting)
    yield _gauge("requests_waiting_oldest_age_seconds", "Age of the oldest waiting sequence.", age)
    yield _gauge("running_limit_requests", "Sequences that can run at once.", running_limit)


def _work(stats: EngineStats) -> Iterator[Metric]:
    steps = CounterMetricFamily("gemserve_engine_steps", "Steps by kind.", labels=["kind"])
    yield _labelled(steps, {(kind,): float(count) for kind, count in stats.steps_total.items()})
    yield _counter("engine_busy_seconds", "Time in steps.", stats.busy_seconds_total)
    yield _gauge(
        "engine_last_step_timestamp_seconds",
        "When a step last began or ended, Unix time.",
        stats.last_step_timestamp,
    )
    yield _counter(
        "prefill_tokens",
        "Prompt tokens really computed, again after a preemption.",
        stats.prefill_tokens_total,
    )
    yield _counter(
        "preemptions", "Sequences sent back to the queue for lack of blocks.", stats.preemptions_total
    )
    yield _counter("numerical_faults", "Sequences ended by non-finite logits.", stats.numerical_faults_total)
    yield _counter(
        "memory_faults", "Steps, or parts of one, that found no memory.", stats.memory_faults_total
    )


def _cache(stats: EngineStats) -> Iterator[Metric]:
    pools = stats.pools
    ratio = GaugeMetricFamily(
        "gemserve_kv_cache_usage_ratio", "Share of the pool's blocks in use.", labels=["pool"]
    )
    yield _labelled(ratio, {(name,): pool.usage_ratio for name, pool in pools.items()})
    blocks = GaugeMetricFamily("gemserve_kv_cache_blocks", "Blocks by state.", labels=["pool", "state"])
    states: dict[tuple[str, ...], float] = {
        (name, state): float(count)
        for name, pool in pools.items()
        for state, count in (("used", pool.used), ("cached", pool.cached), ("free", pool.free))
    }
    yield _labelled(blocks, states)
    capacity = GaugeMetricFamily(
        "gemserve_kv_cache_capacity_tokens", "Tokens that the pool holds.", labels=["pool"]
    )
    yield _labelled(capacity, {(name,): float(pool.capacity_tokens) for name, pool in pools.items()})
    evicted = CounterMetricFamily(
        "gemserve_kv_cache_evicted_blocks", "Cached blocks given to others.", labels=["pool"]
    )
    yield _labelled(evicted, {(name,): float(pool.evicted_total) for name, pool in pools.items()})
    yield _counter(
        "kv_cache_recycled_blocks", "Local blocks given back behind the window.", stats.recycled_blocks_total
    )
    yield _counter(
        "prefix_cache_queried_tokens",
        "Tokens looked up in the prefix cache.",
        stats.prefix_queried_tokens_total,
    )
    yield _counter(
        "prefix_cache_hit_tokens", "Tokens found in the prefix cache.", stats.prefix_hit_tokens_total
    )
    limited = CounterMetricFamily(
        "gemserve_prefix_cache_limited",
        "Admissions whose prefix hit ended for lack of blocks in this pool.",
        labels=["pool"],
    )
    yield _labelled(limited, {(name,): float(count) for name, count in stats.prefix_limited_total.items()})


def _speculation(stats: SpeculationStats) -> Iterator[Metric]:
    yield _counter("spec_decode_drafts", "Drafts proposed; 0 without speculation.", stats.drafts_total)
    yield _counter("spec_decode_draft_tokens", "Tokens proposed in drafts.", stats.draft_tokens_total)
    yield _counter(
        "spec_decode_accepted_tokens", "Drafted tokens that were accepted.", stats.accepted_tokens_total
    )
    family = CounterMetricFamily(
        "gemserve_spec_decode_accepted_tokens_per_position",
        "Accepted tokens by their place in the draft.",
        labels=["position"],
    )
    accepted = stats.accepted_tokens_by_position
    yield _labelled(family, {(str(position),): float(count) for position, count in enumerate(accepted)})
