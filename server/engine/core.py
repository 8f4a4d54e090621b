"""The synchronous body of the engine: one ``step()`` schedules, runs the model and takes the results. No
threads, no asyncio.

With ``async_scheduling``, the device is given the next step before the results of the one that it computes
are read, wherever the scheduler can tell it without them. Never more than that one is ahead. The only place
that hands work to a model runner. Everything it owns may be touched by one thread only.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from model.interface.sequence_chunk import AsyncRunner, LaunchedStep, Runner, StepInput, StepMemoryError
from server.engine.kv.kv_manager import KVCacheManager
from server.engine.memory import KnownResults, OnFault, run_in_parts, run_within_memory
from server.engine.request import EngineRequest, Request, RequestExpiredError, RequestTimings
from server.engine.scheduler.outputs import StepOutputs
from server.engine.scheduler.scheduler import EXPIRED, Scheduler, SchedulerConfig
from server.engine.stats import EngineStats, StepKind, StepStats

logger = logging.getLogger("gemserve.engine")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose results have not been taken."""

    input: StepInput
    step: LaunchedStep
    started: float


class EngineCore:
    """Requests in, outputs out, one step at a time."""

    def __init__(
        self,
        runner: Runner,
        kv: KVCacheManager,
        config: SchedulerConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        debug_invariants: bool = False,
        sample_seconds: Callable[[], float] = lambda: 0.0,
        async_scheduling: bool = False,
    ) -> None:
        """``sample_seconds``: the time that the runner has spent on sampling so far. ``async_scheduling``:
        where the next step does not depend on what this one draws but for its tokens, it is launched before
        this one's results are read; the runner is an AsyncRunner then."""
        self._runner = runner
        assert not async_scheduling or isinstance(runner, AsyncRunner), (
            "this runner computes nothing beside the host"
        )
        self._async_runner = runner if async_scheduling and isinstance(runner, AsyncRunner) else None
        self._launched: deque[_Launched] = deque()
        self._finished = 0.0  # when the last step's results were taken
        # When this call of ``step`` began, and what of it was spent in the runner.
        self._step_started = self._runner_seconds = 0.0
        self._sample_seconds = sample_seconds
        self._clock = clock
        self._debug_invariants = debug_invariants
        self.scheduler = Scheduler(config, kv, clock)
        self.last_step: StepStats | None = None  # None after a step that had nothing to run

    @property
    def stats(self) -> EngineStats:
        return self.scheduler.stats

    @property
    def has_work(self) -> bool:
        return bool(self._launched) or self.scheduler.has_work

    def add(self, spec: EngineRequest, arrival: float | None = None) -> None:
        """Queue a request. ``arrival`` is a time of this core's clock."""
        self.scheduler.add(Request(spec, RequestTimings(self._clock() if arrival is None else arrival)))

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; unknown and finished ones are left alone."""
        self.scheduler.abort(request_id)
        self._after_change()

    def step(self) -> StepOutputs:
        """Take the results of a step: of the one that the last call launched ahead, or else of one that is
        launched now. An exception from the runner leaves the core unusable: the caller ends the engine."""
        self._step_started, self._runner_seconds, sampled = self._clock(), 0.0, self._sample_seconds()
        expired = self.scheduler.expire()
        while self._may_launch:
            step = self.scheduler.schedule()
            if step is None or not self._run(step):
                break
        if self._launched:
            launched = self._launched.popleft()
            outputs = self.scheduler.update(self._timed(launched.step.results))
            self._count(launched, self._sample_seconds() - sampled)
        else:
            outputs, self.last_step = StepOutputs([], []), None
        for request in expired:
            outputs.add(request, RequestExpiredError(EXPIRED))
        self._after_change()
        return outputs

    @property
    def _may_launch(self) -> bool:
        """One step, and one ahead of it where its results are not known yet."""
        if not self._launched:
            return True
        is_ahead = len(self._launched) > 1
        return (
            self._async_runner is not None
            and not is_ahead
            and not isinstance(self._launched[0].step, KnownResults)
        )

    def _run(self, step: StepInput) -> bool:
        """Hand a step to the runner. False: there was no memory for it ahead of the results of the one
        before."""
        launched = self._launch_ahead(step) if self._launched else self._launch(step)
        if launched is None:
            self.scheduler.give_up(step)
            return False
        step.batch.changes.clear()  # the runner has seen them
        self._launched.append(launched)
        return True

    def _launch(self, step: StepInput) -> _Launched:
        """Out of memory, a step runs in parts, and later ones are smaller."""
        self.scheduler.write_stats()  # a scrape during a long step shows what it runs
        self.stats.last_step_timestamp = time.time()
        num_faults = 0

        def on_fault(error: StepMemoryError) -> None:
            nonlocal num_faults
            if num_faults == 0:
                logger.error(
                    "a step of %d tokens ran out of memory and is run in parts: %s", step.num_tokens, error
                )
            num_faults += 1
            self.stats.memory_faults_total += 1

        launched = self._timed(lambda: self._hand_over(step, on_fault))
        if num_faults == 0:
            self.scheduler.budget.found_memory()
        else:
            self.scheduler.budget.found_no_memory(step.num_tokens)
        return _Launched(step, launched, self._step_started)

    def _hand_over(self, step: StepInput, on_fault: OnFault) -> LaunchedStep:
        if self._async_runner is None:
            return KnownResults(run_within_memory(self._runner, step, on_fault))
        try:
            return self._async_runner.launch(step)
        except StepMemoryError as error:
            on_fault(error)
        return KnownResults(run_in_parts(self._runner, step, on_fault))

    def _launch_ahead(self, step: StepInput) -> _Launched | None:
        assert self._async_runner is not None
        launch, started = self._async_runner.launch, self._clock()
        try:
            launched = self._timed(lambda: launch(step))
        # once the tokens are known, the same step is run in parts if it has to be
        except StepMemoryError as error:
            logger.debug("no memory for a step ahead of the last one's results: %s", error)
            return None
        self.scheduler.budget.found_memory()
        return _Launched(step, launched, started)

    def _timed(self, call: Callable[[], T]) -> T:
        """A call into the runner: its time is not the host's own."""
        began = self._clock()
        value = call()
        self._runner_seconds += self._clock() - began
        return value

    def _count(self, launched: _Launched, sample_seconds: float) -> None:
        """Write down a step whose results have been taken."""
        finished, step = self._clock(), launched.input
        num_tokens, num_prefill_tokens = step.num_tokens, step.num_prefill_tokens
        kind: StepKind = (
            "decode"
            if num_prefill_tokens == 0
            else "prefill"
            if num_prefill_tokens == num_tokens
            else "mixed"
        )
        self.last_step = StepStats(
            kind=kind,
            duration=finished
            - max(launched.started, self._finished),  # one ahead has the device once the one before ends
            schedule_seconds=finished - self._step_started - self._runner_seconds,
            num_tokens=num_tokens,
            num_sequences=len(step),
            num_prefill_tokens=num_prefill_tokens,
            sample_seconds=sample_seconds,
        )
        self._finished = finished
        self.stats.steps_total[kind] += 1
        self.stats.busy_seconds_total += self.last_step.duration
        self.stats.last_step_timestamp = time.time()
        self.scheduler.budget.observe(self.last_step)

    def _after_change(self) -> None:
        self.scheduler.write_stats()
        if self._debug_invariants:
            self.scheduler.check_invariants()
        elif not self.has_work:
            self.scheduler.check_idle()
