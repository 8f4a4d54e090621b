"""What a decode step costs the host: the engine's own code, from the schedule to the outputs, over a device
that takes no time.

Every sequence decodes; the contexts are spread evenly up to the longest, so that in every step some of them
begin a block, cache a full one and free a skipped one. Delivery is what the event loop's thread does
afterwards, beside the next step: it makes the outputs and wakes a reader for each sequence.
"""

import asyncio
import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from model.interface.kv_cache_spec import KVCacheSpec
from model.interface.running_batch import RunningBatch
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import Runner
from server.engine.async_engine import AsyncEngine, EngineLimits
from server.engine.core import EngineCore
from server.engine.kv.kv_manager import KVCacheManager
from server.engine.request import EngineRequest
from server.engine.scheduler.outputs import StepOutputs
from server.engine.scheduler.scheduler import SchedulerConfig

PARTS = {
    "schedule": "which sequences run, their blocks",
    "chunks": "what the runner is told of each",
    "batch": "tokens, positions and block tables as tensors",
    "sample": "settings of the draws, their results",
    "update": "cache full blocks, free skipped ones, append, finish",
    "books": "statistics",
}
BLOCK_SIZE = 16
MAX_BATCHED_TOKENS = 4096


@dataclass(slots=True)
class StepParts:
    """Seconds of each part of the steps measured, and of the delivery of their outputs."""

    steps: list[dict[str, float]] = field(default_factory=list)
    steps_ahead: list[dict[str, float]] = field(default_factory=list)
    deliveries: list[float] = field(default_factory=list)


class _Laps:
    """A stop watch: each lap is the time since the last one, added to its name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = 0.0

    def start(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def around(self, function: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
        """The same function; what was done until it is called is ``before``, what it does is ``after``."""

        def timed(*arguments: Any) -> Any:
            self.lap(before)
            result = function(*arguments)
            self.lap(after)
            return result

        return timed


def spread_lengths(num_seqs: int, longest: int) -> list[int]:
    """Evenly up to the longest, each somewhere in its block."""
    rng = random.Random(0)
    return [
        max(1, longest * (index + 1) // num_seqs - rng.randrange(BLOCK_SIZE)) for index in range(num_seqs)
    ]


def decoding_core(
    runner: Runner,
    spec: KVCacheSpec,
    lengths: Sequence[int],
    temperature: float = 0.0,
    *,
    async_scheduling: bool = False,
) -> EngineCore:
    """An engine whose sequences, with prompts of these lengths, have all begun to decode."""
    num_global = 2 + sum(length // spec.block_size + 100 for length in lengths)
    num_local = 2 * spec.local_pool_blocks(len(lengths), MAX_BATCHED_TOKENS)
    batch = RunningBatch(len(lengths), num_global - 1)
    kv = KVCacheManager(spec, batch, num_global, num_local, prefix_caching=True)
    config = SchedulerConfig(len(lengths), MAX_BATCHED_TOKENS, kv.capacity_tokens)
    core = EngineCore(runner, kv, config, async_scheduling=async_scheduling)
    rng = random.Random(0)
    for index, length in enumerate(lengths):
        sampling = SamplingParams(
            max_tokens=1 << 30,
            temperature=temperature,
            top_p=0.95,
            seed=index,
            stop_token_ids=frozenset({1, 106}),
        )
        core.add(
            EngineRequest(
                f"{index}", [2, *(rng.randrange(2000, 200_000) for _ in range(length - 1))], sampling
            )
        )
    while core.scheduler.waiting or any(request.num_output_tokens == 0 for request in core.scheduler.running):
        core.step()
    return core


def measure_overhead(num_seqs: int, longest: int, num_steps: int, temperature: float = 0.0) -> StepParts:
    """Times ``num_steps`` decode steps of so many sequences, whose contexts reach up to ``longest`` tokens,
    and as many that are launched ahead."""
    parts = StepParts()
    for async_scheduling in (True, False):
        laps, core = _timed_core(
            spread_lengths(num_seqs, longest), temperature, async_scheduling=async_scheduling
        )
        # As a server does (server/cli/serving.py): what was there before the first request is not looked
        # through for garbage.
        gc.collect()
        gc.freeze()
        outputs = StepOutputs([], [])
        for _ in range(num_steps):
            outputs = StepOutputs([], [])  # as in a server, they are not freed by the thread that steps
            laps.start()
            outputs = core.step()
            laps.lap("books")
            (parts.steps_ahead if async_scheduling else parts.steps).append(laps.seconds)
        if not async_scheduling:
            parts.deliveries = asyncio.run(_deliveries(core, outputs, num_steps))
        gc.unfreeze()
    return parts


def _timed_core(
    lengths: Sequence[int], temperature: float, *, async_scheduling: bool
) -> tuple[_Laps, EngineCore]:
    from model.bench.stub_device import stub_runner

    laps = _Laps()
    runner = stub_runner(BLOCK_SIZE, on_call=lambda: laps.lap("batch"))
    core = decoding_core(runner, runner.spec, lengths, temperature, async_scheduling=async_scheduling)
    scheduler = core.scheduler
    scheduler.schedule = laps.around(scheduler.schedule, "schedule", "schedule")  # type: ignore[method-assign]
    if async_scheduling:
        runner.launch = laps.around(runner.launch, "chunks", "sample")  # type: ignore[method-assign]
        scheduler.update = laps.around(scheduler.update, "sample", "update")  # type: ignore[method-assign]
    else:
        runner.run = laps.around(runner.run, "chunks", "sample")  # type: ignore[method-assign]
        scheduler.update = laps.around(scheduler.update, "books", "update")  # type: ignore[method-assign]
    return laps, core


async def _deliveries(core: EngineCore, outputs: StepOutputs, count: int) -> list[float]:
    """Seconds from the hand-over of a step's outputs until every reader has its own and waits for the
    next."""
    engine = AsyncEngine(core, EngineLimits(1, 1, 1))
    taken = 0
    done = asyncio.Event()

    async def read(spec: EngineRequest) -> None:
        nonlocal taken
        async for _ in engine.generate(spec):
            taken += 1
            if taken % len(outputs) == 0:
                done.set()

    readers = [asyncio.create_task(read(request.spec)) for request, _ in outputs]
    await asyncio.sleep(0.1)
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        engine._deliver(outputs)
        await done.wait()
        seconds.append(time.perf_counter() - start)
        done.clear()
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    return seconds


def render(parts: StepParts, num_seqs: int, longest: int, temperature: float) -> str:
    kind = "greedy" if temperature == 0 else f"temperature {temperature:g}, top_p 0.95"
    rows = [(part, [step[part] for step in parts.steps], meaning) for part, meaning in PARTS.items()]
    rows.append(("step", [sum(step.values()) for step in parts.steps], "all of these"))
    waits = [sum(step.values()) - step["sample"] for step in parts.steps]
    rows.append(("waits", waits, "all but sample: before the device gets its next work"))
    ahead = [sum(step.values()) for step in parts.steps_ahead]
    rows.append(
        ("ahead", ahead, "a step with --async-scheduling: the device waits only where its own takes less")
    )
    rows.append(("delivery", parts.deliveries, "in the event loop's thread, beside the next step"))
    lines = [f"{num_seqs} sequences, contexts up to {longest} tokens, {kind}; {len(parts.steps)} steps, ms"]
    lines.append(f"  {'':<10}{'median':>8}{'fastest tenth':>15}")
    for part, seconds, meaning in rows:
        tenth = sorted(seconds)[len(seconds) // 10]
        lines.append(f"  {part:<10}{statistics.median(seconds) * 1e3:>8.3f}{tenth * 1e3:>15.3f}   {meaning}")
    return "\n".join(lines)
