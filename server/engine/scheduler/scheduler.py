"""Which requests run in the next step, and how many tokens of each; what a finished step means for them.

Running requests go first (decodes, then half-done prefills), then waiting ones, first come first served among
those of the lowest priority number, in chunks within ``max_num_batched_tokens``. Only the global pool drives
admission; when it runs dry, the request admitted last among those of the highest number is preempted and
later recomputed from its tokens. Imports no torch, keeps no clock of its own.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model.interface.sequence_chunk import NOT_FINITE, ChunkResult, SampledTokens, sampled
from server.engine.kv.kv_manager import KVCacheManager
from server.engine.request import Request, RequestExpiredError, RequestFailedError, RequestStatus, TokenOutput
from server.engine.scheduler.ahead import batch_ahead
from server.engine.scheduler.decode_group import DecodeGroup
from server.engine.scheduler.outputs import append_result
from server.engine.scheduler.scheduled_batch import ScheduledBatch, ScheduledChunk
from server.engine.scheduler.step_budget import StepBudget
from server.engine.stats import EngineStats


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step. ``max_model_len`` is the effective one: at most what the cache can hold for a single
    sequence."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    # Tests only: admit on the first chunk instead of the whole prompt, so that preemption happens in every
    # run.
    over_admission: bool = False


RUNNING = RequestStatus.RUNNING  # the member of an Enum is looked up slowly
RequestEvent = tuple[Request, TokenOutput | RequestFailedError | RequestExpiredError]


def _priority(request: Request) -> int:
    return request.spec.priority


def _decodes(request: Request) -> bool:
    """The step runs the token sampled last, and nothing else, of this request."""
    return request.num_output_tokens > 0 and request.num_uncomputed_tokens == 1


class Scheduler:
    """Owner of the waiting and the running queue."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, clock: Callable[[], float]) -> None:
        self.config = config
        self.kv = kv
        self.clock = clock
        self.waiting: deque[Request] = (
            deque()
        )  # by priority; within one, the preempted, then the new in order of arrival
        self.running: list[Request] = []  # in order of admission
        self._group: DecodeGroup | None = (
            None  # the last step, if all of it just got a token; void once one has gone
        )
        # The step that runs already while the results of the one before it are taken; these then come next.
        self.ahead: ScheduledBatch | None = None
        self._held: list[
            Request
        ] = []  # have ended, and their blocks are in use until the results of the step ahead are there
        self._may_admit = (
            True  # False: nothing that waits can be admitted until one comes first in the queue, or any goes
        )
        self.stats = EngineStats()
        self.budget = StepBudget(config.max_num_batched_tokens, kv.block_size)
        # A share of the pool is left free at admission, so that what runs can grow before anything is
        # preempted.
        self._watermark = kv.global_pool.num_usable // 100

    def add(self, request: Request) -> None:
        assert request.num_tokens <= self.config.max_model_len, (
            "the caller checks that a request can ever fit"
        )
        request.max_num_tokens = min(
            request.num_prompt_tokens + request.sampling.max_tokens, self.config.max_model_len
        )
        index = bisect_right(self.waiting, request.spec.priority, key=_priority)
        self.waiting.insert(index, request)
        if index == 0:  # behind one that cannot be admitted, it cannot either
            self._may_admit = True

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def expire(self) -> list[RequestEvent]:
        """Drop what was never started and must not be any more."""
        now = self.clock()
        expired = [r for r in self.waiting if not r.admitted and (r.spec.queue_deadline or now) < now]
        for request in expired:
            self.abort(request)
            request.timings.finished = now
        return [
            (r, RequestExpiredError("The request was queued for longer than its client would wait."))
            for r in expired
        ]

    def schedule(self) -> ScheduledBatch:
        """Choose the next step's chunks and allocate their blocks."""
        batch = ScheduledBatch()
        self._may_admit = True
        prefills = self._schedule_decodes(batch)
        budget = self.budget.for_prefills(batch.num_tokens)
        budget -= self._schedule_prefills(batch, prefills, budget)
        if not batch.num_preempted and self.waiting:
            budget -= self._schedule_waiting(batch, budget)
        self._extend_prefills(batch, budget)
        assert batch.num_sequences or not self.running, "running requests must move in every step"
        return batch

    def schedule_ahead(self, batch: ScheduledBatch) -> ScheduledBatch | None:
        """The step after ``batch``, all of whose tokens are plain draws that are not known yet; None where
        they must be. Nothing is admitted or preempted."""
        if batch.prefills or (self.waiting and self._may_admit):
            return None
        return batch_ahead(batch, self._group, self.running, self.kv)

    def _schedule_decodes(self, batch: ScheduledBatch) -> list[Request]:
        """Schedules every request with one uncomputed token; the others are returned. While the same ones
        decode from step to step, nothing is done but for those that begin a block."""
        decodes, prefills = batch.decodes, batch.prefills
        group = self._group
        if group is not None and len(group.requests) == len(self.running):
            decodes += group.requests
            batch.group = group
            self._begin_blocks(group, batch)
            return []
        others: list[Request] = []
        limit = self.config.max_num_batched_tokens
        for request in list(self.running):
            num_tokens = len(request.token_ids)
            if num_tokens - request.num_computed_tokens != 1:
                others.append(request)
            elif request.status is not RUNNING or len(decodes) + len(prefills) >= limit:
                continue
            elif num_tokens <= request.num_slots or self._allocate_or_preempt(request, 1, batch):
                if num_tokens > request.num_prompt_tokens:
                    decodes.append(request)
                else:
                    prefills.append(ScheduledChunk(request, 1))
        return others

    def _begin_blocks(self, group: DecodeGroup, batch: ScheduledBatch) -> None:
        wanting = [request for request in group.begins_block if len(request.token_ids) > request.num_slots]
        if wanting and not self.kv.allocate_one_each(wanting):
            for request in wanting:
                if request.status is RUNNING:  # else it was preempted for one before it
                    self._allocate_or_preempt(request, 1, batch)

    def _schedule_prefills(self, batch: ScheduledBatch, prefills: list[Request], budget: int) -> int:
        used = 0
        for request in prefills:
            if used >= budget:
                break
            if request.status is not RUNNING:
                continue
            others = bool(self.waiting) or request is not self.running[-1]
            chunk = self._chunk(request, budget - used, others)
            if self._allocate_or_preempt(request, chunk, batch):
                batch.prefills.append(ScheduledChunk(request, chunk))
                used += chunk
        return used

    def _chunk(self, request: Request, budget: int, others: bool) -> int:
        """Tokens of a prefill to run: half of the budget while others want some of it too, so that short ones
        get through."""
        if others:
            budget = min(budget, max(self.kv.block_size, budget // 2))
        return min(request.num_uncomputed_tokens, budget)

    def _allocate_or_preempt(self, request: Request, num_tokens: int, batch: ScheduledBatch) -> bool:
        """Allocate, preempting from the tail while the global pool is dry. False when the request itself had
        to go."""
        while not self.kv.allocate(request, num_tokens):
            victim = max(reversed(self.running), key=_priority)  # the first of equals: the last admitted
            self._preempt(victim)
            batch.num_preempted += 1
            batch.drop(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.kv.free(request)
        request.num_computed_tokens = 0
        request.hidden_sum = None
        request.status = RequestStatus.PREEMPTED
        request.timings.num_preemptions += 1
        self.waiting.insert(bisect_left(self.waiting, request.spec.priority, key=_priority), request)
        self.stats.preemptions_total += 1

    def _schedule_waiting(self, batch: ScheduledBatch, budget: int) -> int:
        used, num_pending = 0, 0
        for request in list(self.waiting):
            if len(self.running) >= self.config.max_num_seqs:
                self._may_admit = False
                break
            if used >= budget:
                break
            if self.kv.still_waits(request):
                num_pending += 1
                continue
            hit = self.kv.find_hit(request)
            if hit.pending:
                num_pending += 1
                # a running request computes the next block of this very prefix: wait for it, compute it once
                continue
            request.num_computed_tokens = hit.num_tokens
            chunk = self._chunk(request, budget - used, others=request is not self.waiting[-1])
            target = hit.num_tokens + chunk if self.config.over_admission else request.num_tokens
            if not self._fits(self.kv.num_blocks_to_admit(hit, target)):
                request.num_computed_tokens = 0
                self._may_admit = num_pending > 0
                break
            self.waiting.remove(request)
            self.running.append(request)
            self.kv.admit(request, hit)
            allocated = self.kv.allocate(request, chunk)
            assert allocated, "admission counted too few blocks"
            self._count_admission(request, hit.num_tokens, hit.limited_by)
            if _decodes(request):
                batch.append_decode(
                    request
                )  # it was preempted, and finds all but its last token in the prefix cache
            else:
                batch.prefills.append(ScheduledChunk(request, chunk))
            used += chunk
        return used

    def _fits(self, num_blocks: int) -> bool:
        """Whether admission leaves what running requests still need, and a watermark. Never says no when
        nothing runs."""
        free = self.kv.global_pool.num_free
        if not self.running or self.config.over_admission:
            return num_blocks <= free
        outstanding = sum(self.kv.num_blocks_outstanding(request) for request in self.running)
        return num_blocks + outstanding + self._watermark + len(self.running) <= free

    def _count_admission(self, request: Request, num_hit_tokens: int, limited_by: str | None) -> None:
        request.status = RequestStatus.RUNNING
        if not request.admitted:
            request.admitted = True
            request.num_cached_tokens = num_hit_tokens
            request.timings.first_scheduled = self.clock()
        if self.kv.prefix_caching:
            self.stats.prefix_queried_tokens_total += request.num_tokens
            self.stats.prefix_hit_tokens_total += num_hit_tokens
            if limited_by is not None:
                self.stats.prefix_limited_total[limited_by] += 1

    def _extend_prefills(self, batch: ScheduledBatch, budget: int) -> None:
        """Give what is left of the budget to the prefills already chosen, in their order."""
        for chunk in batch.prefills:
            more = min(budget, chunk.request.num_uncomputed_tokens - chunk.num_tokens)
            if more > 0 and self.kv.allocate(chunk.request, chunk.num_tokens + more):
                chunk.num_tokens += more
                budget -= more

    def update(self, batch: ScheduledBatch, results: Sequence[ChunkResult]) -> Sequence[RequestEvent]:
        """Take a step's results, first the decodes': advance, publish and recycle, append sampled tokens,
        finish what is done."""
        self._release_held()
        of_decodes = self._update_decodes(batch, results)
        if not batch.prefills:
            return of_decodes
        events = list(of_decodes)
        for chunk, result in zip(batch.prefills, results[len(batch.decodes) :], strict=True):
            request = chunk.request
            if request.status is not RUNNING:
                continue
            position = request.num_computed_tokens
            samples = chunk.samples
            self.stats.prefill_tokens_total += chunk.num_tokens
            request.num_computed_tokens += chunk.num_tokens
            if result.error is not None:
                events.append(self._fail(request, result.error))
                continue
            self.kv.commit(request)
            if result.hidden_sum is not None:
                request.hidden_sum = (
                    result.hidden_sum
                    if request.hidden_sum is None
                    else request.hidden_sum + result.hidden_sum
                )
            # Positions recomputed after a preemption yield log-probabilities that are already there.
            request.prompt_logprobs.extend(
                result.prompt_logprobs[max(0, len(request.prompt_logprobs) - position) :]
            )
            if samples or request.num_uncomputed_tokens == 0:
                events.append(self._append(request, result))
        return events

    def _release_held(self) -> None:
        for request in self._held:
            self.kv.free(request)
        self._held = []

    def _update_decodes(
        self, batch: ScheduledBatch, results: Sequence[ChunkResult]
    ) -> Sequence[RequestEvent]:
        if isinstance(results, SampledTokens):
            requests, token_ids = batch.decodes, results.token_ids
            if len(requests) > len(self.running):  # some have ended since the step was launched
                going_on = [index for index, request in enumerate(requests) if request.status is RUNNING]
                requests, token_ids = [requests[i] for i in going_on], [token_ids[i] for i in going_on]
            if requests and len(requests) == len(self.running):
                return self._update_group(requests, token_ids)
        self._group = None
        # One that does not run has ended while the step ran.
        each = zip(batch.decodes, results, strict=False)
        return [self._update_decode(request, result) for request, result in each if request.status is RUNNING]

    def _update_group(self, requests: list[Request], token_ids: list[int]) -> Sequence[RequestEvent]:
        """``_update_decode`` of each. Hundreds of them get their next token in each step, and nothing else is
        to be done."""
        group = self._group
        if group is None or group.requests != requests:
            group = self._group = DecodeGroup(requests, self.kv.block_size)
        if not group.goes_on(token_ids):
            self._group = None
            each = zip(requests, token_ids, strict=True)
            return [self._update_decode(request, sampled(token_id)) for request, token_id in each]
        outputs = group.advance(token_ids)
        self.kv.commit_each(group.begins_block)
        return outputs

    def _update_decode(self, request: Request, result: ChunkResult) -> RequestEvent:
        request.num_computed_tokens += 1
        if result.error is not None:
            return self._fail(request, result.error)
        if request.num_computed_tokens % self.kv.block_size == 0:
            self.kv.commit(request)
        return self._append(request, result)

    def _fail(self, request: Request, error: str) -> RequestEvent:
        self.stats.numerical_faults_total += error == NOT_FINITE
        self._finish(request)
        return request, RequestFailedError(error)

    def _append(self, request: Request, result: ChunkResult) -> RequestEvent:
        output = append_result(request, result, self.clock)
        if output.finish_reason is not None:
            self._finish(request)
        return request, output

    def _finish(self, request: Request) -> None:
        self.running.remove(request)
        if self.ahead is not None and request in self.ahead.decodes:
            self._held.append(request)
        else:
            self.kv.free(request)
        self._may_admit = True
        request.status = RequestStatus.FINISHED
        request.timings.finished = self.clock()

    def abort(self, request: Request) -> None:
        """End a request in whatever state it is. Idempotent."""
        if request.status is RUNNING:
            self._finish(request)
        elif request.status is not RequestStatus.FINISHED:
            self.waiting.remove(request)
            self._may_admit = True
            request.status = RequestStatus.FINISHED

    def write_stats(self) -> None:
        """Refresh the gauges of ``stats``."""
        self.stats.num_running = len(self.running)
        self.stats.num_waiting = len(self.waiting)
        self.stats.oldest_waiting_arrival = min((r.timings.arrival for r in self.waiting), default=None)
        self.kv.write_stats(self.stats)

    def check_idle(self) -> None:
        """Assert that nothing is held while nothing runs. Quick whatever the size of the pools: it delays an
        answer's end."""
        assert not self.has_work
        assert not self.kv.tables, "block tables are left while nothing runs"
        self.kv.check_idle()

    def check_invariants(self) -> None:
        assert set(self.kv.tables) == {request.request_id for request in (*self.running, *self._held)}
        assert self.ahead is not None or not self._held, "blocks are held for a step that does not run"
        assert not {id(r) for r in self.waiting} & {id(r) for r in self.running}
        for request in self.running:
            tables = self.kv.tables[request.request_id]
            first = self.kv.spec.first_local_block(request.num_computed_tokens)
            assert tables.num_recycled >= first, "a block outside the window is still held"
            assert len(tables.global_blocks) * self.kv.block_size >= request.num_computed_tokens
            assert request.num_slots == len(tables.global_blocks) * self.kv.block_size
        if self._group is not None and len(self._group.requests) == len(self.running):
            self._group.check(self.kv.block_size)
        self.kv.check_invariants()
