"""The synchronous body of the engine: one ``step()`` schedules, runs the model and takes the results. No threads, no asyncio.

The only place that hands work to a model runner. Everything it owns may be touched by one thread only.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from model.sequence_chunk import ChunkResult, DecodeChunks, Runner, SequenceChunk, StepMemoryError
from server.engine.kv_manager import KVCacheManager
from server.engine.memory import run_within_memory
from server.engine.request import GenerationSpec, OutputTokens, Request, RequestTimings
from server.engine.scheduled_batch import ScheduledBatch
from server.engine.scheduler import RequestEvent, Scheduler, SchedulerConfig
from server.engine.stats import EngineStats, StepStats

logger = logging.getLogger("gemserve.engine")

# A step that also prefills may take this many times a decode-only step: running streams then pause less than five times their
# usual gap, with room for the noise of the measurement.
MIXED_STEP_RATIO = 3.5


@dataclass(slots=True)
class _StepTimes:
    """Moving averages of what steps cost, in seconds; None until measured."""

    decode_step: float | None = None
    prefill_token: float | None = None

    def observe(self, step: StepStats) -> None:
        if step.kind == "decode":
            self.decode_step = _average(self.decode_step, step.duration)
        else:
            decoding = self.decode_step if step.kind == "mixed" and self.decode_step is not None else 0.0
            self.prefill_token = _average(self.prefill_token, max(0.0, step.duration - decoding) / step.num_prefill_tokens)


def _average(old: float | None, new: float) -> float:
    return new if old is None else 0.8 * old + 0.2 * new


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
    ) -> None:
        """``sample_seconds``: the time that the runner has spent on sampling so far."""
        self._runner = runner
        self._sample_seconds = sample_seconds
        self._clock = clock
        self._debug_invariants = debug_invariants
        self._kv = kv
        self.scheduler = Scheduler(config, kv, clock)
        self._requests: dict[str, Request] = {}
        self._times = _StepTimes()
        self._decoding: list[Request] = []  # of the last step; their chunks are used again while these are the same
        self._num_admissions = 0
        self._decode_chunks = self._new_decode_chunks([])
        self.last_step: StepStats | None = None  # None after a step that had nothing to run

    @property
    def stats(self) -> EngineStats:
        return self.scheduler.stats

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

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
        """Run one step. An exception from the runner leaves the core unusable: the caller ends the engine."""
        started = self._clock()
        expired = self.scheduler.expire()
        batch = self.scheduler.schedule()
        if not batch.num_sequences:
            self.last_step = None
            self._forget_finished(expired)
            self._after_change()
            return expired
        chunks = self._chunks(batch)
        kind, num_tokens, num_prefill_tokens = batch.kind, batch.num_tokens, batch.num_prefill_tokens
        self.scheduler.write_stats()  # a scrape during a long step shows what it runs
        self.stats.last_step_timestamp = time.time()
        sampled = self._sample_seconds()
        before_run = self._clock()
        results = self._run(chunks, num_tokens)
        self._kv.rows.next_step()
        after_run = self._clock()
        num_running = self.scheduler.num_running
        events = self.scheduler.update(batch, results)
        if expired:
            events = [*expired, *events]
        if expired or self.scheduler.num_running < num_running:
            self._forget_finished(events)
        finished = self._clock()
        host = before_run - started + finished - after_run
        sampling = self._sample_seconds() - sampled
        self.last_step = StepStats(kind, finished - started, host, num_tokens, len(chunks), num_prefill_tokens, sampling)
        self._count(self.last_step)
        self._after_change()
        return events

    def _run(self, chunks: Sequence[SequenceChunk], num_tokens: int) -> Sequence[ChunkResult]:
        """Out of memory, a step runs in parts, and later ones prefill less: half as much, then one token more in each step."""
        faults = self.stats.memory_faults_total

        def count(error: StepMemoryError) -> None:
            if self.stats.memory_faults_total == faults:
                logger.error("a step of %d tokens ran out of memory and is run in parts: %s", num_tokens, error)
            self.stats.memory_faults_total += 1

        results = run_within_memory(self._runner, chunks, count)
        limit = self.scheduler.max_step_tokens + 1 if self.stats.memory_faults_total == faults else num_tokens // 2
        self.scheduler.max_step_tokens = min(max(limit, self._kv.block_size), self.scheduler.config.max_num_batched_tokens)
        return results

    def _forget_finished(self, events: Sequence[RequestEvent]) -> None:
        for request, _ in events:
            if request.timings.finished is not None:
                del self._requests[request.request_id]

    def _chunks(self, batch: ScheduledBatch) -> Sequence[SequenceChunk]:
        requests = batch.decodes
        if self._num_admissions != self._kv.num_admissions or requests != self._decoding:
            self._num_admissions = self._kv.num_admissions
            self._decoding, self._decode_chunks = requests, self._new_decode_chunks(requests)
        decodes, group = self._decode_chunks, batch.group
        if group is not None:
            decodes.move(group.last_token_ids, group.num_tokens - 1)
        else:
            token_ids, starts = [r.token_ids[-1] for r in requests], [r.num_computed_tokens for r in requests]
            decodes.move(np.array(token_ids, dtype=np.int64), np.array(starts, dtype=np.int64))
        if not batch.prefills:
            return decodes
        return [*decodes, *(self._sequence_chunk(chunk.request, chunk.num_tokens, chunk.samples) for chunk in batch.prefills)]

    def _new_decode_chunks(self, requests: list[Request]) -> DecodeChunks:
        return DecodeChunks(
            [request.sampling for request in requests],
            [request.num_prompt_tokens for request in requests],
            self._kv.rows,
            [self._kv.tables[request.request_id].row for request in requests],
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
            prompt_targets=request.token_ids[start + 1 : min(stop + 1, request.num_prompt_tokens)] if wants_prompt else (),
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
        times = self._times
        times.observe(step)
        if times.decode_step is not None and times.prefill_token:
            allowed = int((MIXED_STEP_RATIO - 1) * times.decode_step / times.prefill_token)
            config = self.scheduler.config
            self.scheduler.mixed_prefill_tokens = min(max(allowed, self._kv.block_size), config.max_num_batched_tokens)

    def _after_change(self) -> None:
        self.scheduler.write_stats()
        if self._debug_invariants:
            self.scheduler.check_invariants()
        elif not self.has_work:
            self.scheduler.check_idle()
