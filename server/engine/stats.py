"""Plain numbers about the engine, written by its thread and read by anyone without waiting (a scrape never
stops the engine)."""

from dataclasses import dataclass, field
from typing import Literal

StepKind = Literal["prefill", "decode", "mixed"]
POOLS = ("global", "local")


@dataclass(slots=True)
class PoolStats:
    """State of one block pool; counts leave the null block out."""

    used: int = 0
    cached: int = 0
    free: int = 0  # blank blocks
    evicted_total: int = 0
    capacity_tokens: int = 0

    @property
    def usage_ratio(self) -> float:
        total = self.used + self.cached + self.free
        return self.used / total if total else 0.0


@dataclass(frozen=True, slots=True)
class StepStats:
    """One finished step: what it ran and how long its parts took, in seconds."""

    kind: StepKind
    duration: float
    schedule_seconds: float  # host work: schedule and update
    num_tokens: int
    num_sequences: int
    num_prefill_tokens: int
    sample_seconds: float = 0.0  # from logits to tokens


@dataclass(slots=True)
class SpeculationStats:
    """Drafted and accepted tokens; all zero while nothing drafts."""

    drafts_total: int = 0
    draft_tokens_total: int = 0
    accepted_tokens_total: int = 0
    # entry i: of the i-th token of a draft
    accepted_tokens_by_position: list[int] = field(default_factory=list)


@dataclass(slots=True)
class EngineStats:
    """Gauges of now and counters since start."""

    num_running: int = 0
    num_waiting: int = 0
    oldest_waiting_arrival: float | None = None  # time.monotonic()
    last_step_timestamp: float = 0.0  # time.time() when a step last began or ended
    busy_seconds_total: float = 0.0
    steps_total: dict[StepKind, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0, "mixed": 0})
    prefill_tokens_total: int = 0  # prompt and recomputed tokens really run
    preemptions_total: int = 0
    recycled_blocks_total: int = 0
    prefix_queried_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    # Admissions whose hit ended because this pool no longer (or never) held the next block it needed.
    prefix_limited_total: dict[str, int] = field(default_factory=lambda: {"global": 0, "local": 0})
    numerical_faults_total: int = 0
    memory_faults_total: int = 0  # runs of a step, or of a part of one, that found no memory
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    pools: dict[str, PoolStats] = field(default_factory=lambda: {name: PoolStats() for name in POOLS})
