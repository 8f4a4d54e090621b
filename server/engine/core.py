"""The synchronous body of the engine: one ``step()`` schedules, runs the model and takes the results. No
threads, no asyncio.

With ``async_scheduling``, the device is given the next step before the results of the one that it computes
are read, wherever that changes nothing but the time: while every sequence just decodes. Never more than that
one is ahead. The only place that hands work to a model runner. Everything it owns may be touched by one
thread only.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from model.interface.sequence_chunk import (
    AsyncRunner,
    DecodeChunks,
    DrawnTokens,
    LaunchedStep,
    Runner,
    SequenceChunk,
    StepMemoryError,
)
from server.engine.kv.kv_manager import KVCacheManager
from server.engine.memory import KnownResults, run_in_parts, run_within_memory
from server.engine.request import GenerationSpec, OutputTokens, Request, RequestTimings
from server.engine.scheduler.scheduled_batch import ScheduledBatch
from server.engine.scheduler.scheduler import RequestEvent, Scheduler, SchedulerConfig
from server.engine.stats import EngineStats, StepStats

logger = logging.getLogger("gemserve.engine")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose results have not been taken."""

    batch: ScheduledBatch
    step: LaunchedStep
    started: float
    draws_only: bool  # a token for each of its sequences, which the device has and the next step can follow


class EngineCore:
    """Requests in, events out, one step at a time."""

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
        self._ahead: _Launched | None = None
        self._finished = self._runner_seconds = (
            0.0  # when the last step's results were taken; what this call has spent there
        )
        self._sample_seconds = sample_seconds
        self._clock = clock
        self._debug_invariants = debug_invariants
        self._kv = kv
        self.scheduler = Scheduler(config, kv, clock)
        self._requests: dict[str, Request] = {}
        self._decoding: list[
            Request
        ] = []  # of the last step; their chunks are used again while these are the same
        self._num_admissions = 0
        self._decode_chunks = self._new_decode_chunks([])
        self.last_step: StepStats | None = None  # None after a step that had nothing to run

    @property
    def stats(self) -> EngineStats:
        return self.scheduler.stats

    @property
    def has_work(self) -> bool:
        return self._ahead is not None or self.scheduler.has_work

    def add(self, spec: GenerationSpec, arrival: float | None = None) -> None:
        """Queue a request. ``arrival`` is a time of this core's clock."""
        assert spec.request_id not in self._requests, "request ids are unique among live requests"
        request = Request(spec, RequestTimings(self._clock() if arrival is None else arrival))
        self._requests[spec.request_id] = request
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; unknown and finished ones are left alone."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.abort(request)
        self._after_change()

    def step(self) -> Sequence[RequestEvent]:
        """Take the results of a step: of the one that the last call launched ahead, or else of one that is
        launched now. An exception from the runner leaves the core unusable: the caller ends the engine."""
        started = self._clock()
        self._runner_seconds, sampled = 0.0, self._sample_seconds()
        expired = self.scheduler.expire()
        launched = self._ahead or self._launch(self.scheduler.schedule(), started)
        if launched is None:
            self.last_step = None
            self._forget_finished(expired)
            self._after_change()
            return expired
        self._ahead = self._launch_ahead(launched)
        self.scheduler.ahead = None if self._ahead is None else self._ahead.batch
        results = self._timed(launched.step.results)
        num_running = self.scheduler.num_running
        batch = launched.batch
        events = self.scheduler.update(batch, results)
        if expired:
            events = [*expired, *events]
        if expired or self.scheduler.num_running < num_running:
            self._forget_finished(events)
        finished = self._clock()
        duration = finished - max(
            launched.started, self._finished
        )  # a step ahead has the device once the one before it ends
        host = finished - started - self._runner_seconds
        sampling = self._sample_seconds() - sampled
        sizes = batch.num_tokens, batch.num_sequences, batch.num_prefill_tokens
        self.last_step, self._finished = StepStats(batch.kind, duration, host, *sizes, sampling), finished
        self._count(self.last_step)
        self._after_change()
        return events

    def _timed(self, call: Callable[[], T]) -> T:
        """A call into the runner: its time is not the host's own."""
        began = self._clock()
        value = call()
        self._runner_seconds += self._clock() - began
        return value

    def _launch(self, batch: ScheduledBatch, started: float) -> "_Launched | None":
        """Out of memory, a step runs in parts, and later ones prefill less: half as much, then one token more
        in each step."""
        if not batch.num_sequences:
            return None
        chunks, num_tokens = self._chunks(batch), batch.num_tokens
        self.scheduler.write_stats()  # a scrape during a long step shows what it runs
        self.stats.last_step_timestamp = time.time()
        faults = self.stats.memory_faults_total

        def count(error: StepMemoryError) -> None:
            if self.stats.memory_faults_total == faults:
                logger.error(
                    "a step of %d tokens ran out of memory and is run in parts: %s", num_tokens, error
                )
            self.stats.memory_faults_total += 1

        step = self._timed(lambda: self._hand_over(chunks, count))
        self._kv.rows.next_step()
        if self.stats.memory_faults_total == faults:
            self.scheduler.budget.found_memory()
        else:
            self.scheduler.budget.found_no_memory(num_tokens)
        draws = isinstance(chunks, DecodeChunks) and chunks.plain and not isinstance(step, KnownResults)
        return _Launched(batch, step, started, draws_only=draws)

    def _hand_over(
        self, chunks: Sequence[SequenceChunk], on_fault: Callable[[StepMemoryError], None]
    ) -> LaunchedStep:
        if self._async_runner is None:
            return KnownResults(run_within_memory(self._runner, chunks, on_fault))
        try:
            return self._async_runner.launch(chunks)
        except StepMemoryError as error:
            on_fault(error)
        return KnownResults(run_in_parts(self._runner, chunks, on_fault))

    def _launch_ahead(self, launched: "_Launched") -> "_Launched | None":
        """The step after one whose tokens are not known yet, where it needs nothing else of that one's
        results."""
        if self._async_runner is None or not launched.draws_only:
            return None
        batch = self.scheduler.schedule_ahead(launched.batch)
        if batch is None:
            return None
        assert batch.num_tokens_before is not None
        chunks = self._chunks_of_decodes(batch.decodes)
        chunks.follow(DrawnTokens(launched.step, batch.of_batch_before), batch.num_tokens_before)
        launch, started = self._async_runner.launch, self._clock()
        try:
            step = self._timed(lambda: launch(chunks))
        except (
            StepMemoryError
        ) as error:  # once the tokens are known, the same step is run in parts if it has to be
            logger.debug("no memory for a step ahead of the last one's results: %s", error)
            return None
        self._kv.rows.next_step()
        self.scheduler.budget.found_memory()
        return _Launched(batch, step, started, draws_only=True)

    def _forget_finished(self, events: Sequence[RequestEvent]) -> None:
        for request, _ in events:
            if request.timings.finished is not None:
                del self._requests[request.request_id]

    def _chunks(self, batch: ScheduledBatch) -> Sequence[SequenceChunk]:
        requests, group = batch.decodes, batch.group
        decodes = self._chunks_of_decodes(requests)
        if group is not None:
            decodes.move(group.last_token_ids, group.num_tokens - 1)
        else:
            token_ids, starts = [r.token_ids[-1] for r in requests], [r.num_computed_tokens for r in requests]
            decodes.move(np.array(token_ids, dtype=np.int64), np.array(starts, dtype=np.int64))
        if not batch.prefills:
            return decodes
        return [
            *decodes,
            *(
                self._sequence_chunk(chunk.request, chunk.num_tokens, chunk.samples)
                for chunk in batch.prefills
            ),
        ]

    def _chunks_of_decodes(self, requests: list[Request]) -> DecodeChunks:
        """Those of the last step while the requests are the same, not moved on yet."""
        if self._num_admissions != self._kv.num_admissions or requests != self._decoding:
            self._num_admissions = self._kv.num_admissions
            self._decoding, self._decode_chunks = requests, self._new_decode_chunks(requests)
        return self._decode_chunks

    def _new_decode_chunks(self, requests: list[Request]) -> DecodeChunks:
        tables = [self._kv.tables[request.request_id] for request in requests]
        return DecodeChunks(
            [request.sampling for request in requests],
            [request.num_prompt_tokens for request in requests],
            self._kv.rows,
            [of_one.row for of_one in tables],
            [(of_one.global_blocks, of_one.local_blocks) for of_one in tables],
            plain=all(request.sampling.plain and request.grammar is None for request in requests),
            make_chunk=lambda index: self._sequence_chunk(requests[index], 1, samples=True),
        )

    def _sequence_chunk(self, request: Request, num_tokens: int, samples: bool) -> SequenceChunk:
        start, stop = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        tables = self._kv.tables[request.request_id]
        wants_prompt = request.sampling.prompt_logprobs is not None
        return SequenceChunk(
            token_ids=request.token_ids[start:stop],
            start=start,
            global_block_table=tables.global_blocks,
            local_block_table=tables.local_blocks,
            sampling=request.sampling,
            samples=samples,
            prompt_token_ids=request.spec.prompt_token_ids,
            output_token_ids=OutputTokens(request.token_ids, request.num_prompt_tokens),
            prompt_targets=request.token_ids[start + 1 : min(stop + 1, request.num_prompt_tokens)]
            if wants_prompt
            else (),
            grammar=request.grammar,
            pools=request.spec.pools,
            tables=self._kv.rows,
            row=tables.row,
        )

    def _count(self, step: StepStats) -> None:
        stats = self.stats
        stats.steps_total[step.kind] += 1
        stats.busy_seconds_total += step.duration
        stats.last_step_timestamp = time.time()
        self.scheduler.budget.observe(step)

    def _after_change(self) -> None:
        self.scheduler.write_stats()
        if self._debug_invariants:
            self.scheduler.check_invariants()
        elif not self.has_work:
            self.scheduler.check_idle()
