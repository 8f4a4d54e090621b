"""Which requests run in the next step, and how many tokens of each; what a finished step means for them.

Running requests go first (decodes, then half-done prefills), then waiting ones, first come first served among
those of the lowest priority number, in chunks within ``max_num_batched_tokens``. Only the global pool drives
admission; when it runs dry, the request admitted last among those of the highest number is preempted and
later recomputed from its tokens. Imports no torch, keeps no clock of its own.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from model.interface.running_batch import IntArray
from model.interface.sequence_chunk import NOT_FINITE, ChunkResult, SequenceChunk, StepInput, StepResult
from server.engine.kv.kv_manager import KVCacheManager, PrefixHit
from server.engine.request import Request, RequestFailedError, RequestStatus, TokenOutput
from server.engine.scheduler.outputs import StepOutputs, append_result
from server.engine.scheduler.scheduled_step import ScheduledChunk, ScheduledStep
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
EXPIRED = "The request was queued for longer than its client would wait."


def _priority(request: Request) -> int:
    return request.spec.priority


class Scheduler:
    """Owner of the waiting and the running queue. Every step that ``schedule`` gives out comes back through
    ``update`` or ``give_up``, in order."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, clock: Callable[[], float]) -> None:
        self.config = config
        self.kv = kv
        self.batch = kv.batch
        assert self.batch.num_rows >= config.max_num_seqs, "every running request has a row"
        self.clock = clock
        # by priority; within one, the preempted, then the new in order of arrival
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.requests: dict[str, Request] = {}  # all that have not ended, by their ids
        self.budget = StepBudget(config.max_num_batched_tokens, kv.block_size)
        self.stats = EngineStats()
        self._request_of: list[Request | None] = [None] * self.batch.num_rows
        self._running_rows: IntArray | None = None  # of ``running``; None: to be read again
        # Rows that got a bare token each in the last step: while all that run are these, all decode.
        self._decoding_rows: IntArray | None = None
        # every running request can get at least so many tokens more; 0: to be counted again
        self._num_until_longest = 0
        # what ends running requests, and how many of them
        self._stop_tokens: Counter[frozenset[int]] = Counter()
        self._in_flight: deque[StepInput] = deque()  # given out, and their results not taken yet
        # The step given out last gives a bare token to all that run: another one can be scheduled before
        # these are known.
        self._can_go_on = False
        self._held: list[Request] = []  # have ended, and a step in flight uses their blocks
        # False: nothing that waits can be admitted until one comes first in the queue, or any goes
        self._may_admit = True
        # A share of the pool is left free at admission, so that what runs can grow before anything is
        # preempted.
        self._watermark = kv.global_pool.num_usable // 100

    # -- requests --------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        assert request.num_tokens <= self.config.max_model_len, (
            "the caller checks that a request can ever fit"
        )
        assert request.request_id not in self.requests, "request ids are unique among live requests"
        request.max_num_tokens = min(
            request.num_prompt_tokens + request.sampling.max_tokens, self.config.max_model_len
        )
        self.requests[request.request_id] = request
        index = bisect_right(self.waiting, request.spec.priority, key=_priority)
        self.waiting.insert(index, request)
        if index == 0:  # behind one that cannot be admitted, it cannot either
            self._may_admit = True

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; unknown and finished ones are left alone."""
        request = self.requests.get(request_id)
        if request is None:
            return
        if request.status is RUNNING:
            self._finish(request)
        else:
            self._end_waiting(request)

    def expire(self) -> list[Request]:
        """Drop what was never started and must not be any more."""
        now = self.clock()
        expired = [r for r in self.waiting if not r.admitted and (r.spec.queue_deadline or now) < now]
        for request in expired:
            self._end_waiting(request)
            request.timings.finished = now
        return expired

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # -- schedule --------------------------------------------------------------------------------------------

    def schedule(self) -> StepInput | None:
        """The next step, with blocks for all that it computes. None: nothing runs, or the results of the step
        in flight must be known first."""
        if self._in_flight:
            return self._schedule_ahead()
        self._may_admit = True
        step = ScheduledStep()
        prefills = self._schedule_decodes(step)
        budget = self.budget.for_prefills(step.num_tokens)
        budget -= self._schedule_prefills(step, prefills, budget)
        if not step.num_preempted and self.waiting:
            budget -= self._schedule_waiting(step, budget)
        self._extend_prefills(step, budget)
        assert step.num_sequences or not self.running, "running requests must move in every step"
        return self._give_out(step)

    def _give_out(self, scheduled: ScheduledStep) -> StepInput | None:
        if not scheduled.num_sequences:
            return None
        decodes, batch = scheduled.decodes, self.batch
        rows = self._rows if len(decodes) == len(self.running) else _rows_of(decodes)
        chunks = [chunk.sequence_chunk(batch) for chunk in scheduled.prefills]
        step = StepInput(batch, rows, batch.num_computed_tokens[rows], batch.last_token_ids[rows], chunks)
        self._can_go_on = rows is self._rows and np.count_nonzero(batch.is_plain[rows]) == len(rows)
        self._in_flight.append(step)
        return step

    def _schedule_ahead(self) -> StepInput | None:
        """The step after one in flight in which every running request gets a bare token, that nobody knows
        yet. What is known to end there by its length is left out; what ends otherwise is found when the
        results are read. Nothing is admitted or preempted."""
        if not self._can_go_on or (self.waiting and self._may_admit):
            return None
        batch, rows = self.batch, self._rows
        num_tokens = batch.num_tokens[rows] + 1
        if self._num_until_longest <= 1:
            goes_on = num_tokens < batch.max_num_tokens[rows]
            if np.count_nonzero(goes_on) < len(rows):
                rows, num_tokens = rows[goes_on], num_tokens[goes_on]
        if not len(rows) or not self._allocate_missing(rows, num_tokens):
            return None
        step = StepInput(batch, rows, num_tokens - 1, token_ids=None)
        self._in_flight.append(step)
        return step

    def _allocate_missing(self, rows: IntArray, num_tokens: IntArray) -> bool:
        """Slots for so many tokens in each of the rows, which lack one at most. Of all or of none."""
        lacking = np.flatnonzero(num_tokens > self.batch.num_blocks[rows] * self.kv.block_size)
        return not len(lacking) or self.kv.append_blocks(rows[lacking])

    def _schedule_decodes(self, step: ScheduledStep) -> list[Request]:
        """Schedules every request with one uncomputed token; the others are returned."""
        batch, rows = self.batch, self._rows
        num_tokens, limit = batch.num_tokens[rows], self.config.max_num_batched_tokens
        all_decode = rows is self._decoding_rows and len(rows) <= limit
        if all_decode and self._allocate_missing(rows, num_tokens):
            step.decodes += self.running
            return []
        has_one_left = num_tokens - batch.num_computed_tokens[rows] == 1
        chosen: list[Request] = self.running
        others: list[Request] = []
        if np.count_nonzero(has_one_left) < len(rows) or len(rows) > limit:
            others = [self.running[index] for index in np.flatnonzero(~has_one_left)]
            indices = np.flatnonzero(has_one_left)[:limit]
            chosen, rows = [self.running[index] for index in indices], rows[indices]
            num_tokens = num_tokens[indices]
        if not self._allocate_missing(rows, num_tokens):
            for request in list(chosen):
                if request.status is RUNNING:  # else it was preempted for one before it
                    self._allocate_or_preempt(request, 1, step)
            chosen = [request for request in chosen if request.status is RUNNING]
            rows = _rows_of(chosen)
            num_tokens = batch.num_tokens[rows]
        decodes = num_tokens > batch.num_prompt_tokens[rows]
        if np.count_nonzero(decodes) == len(rows):
            step.decodes += chosen
            return others
        for request, is_decode in zip(chosen, decodes.tolist(), strict=True):
            if is_decode:
                step.decodes.append(request)
            else:
                step.prefills.append(ScheduledChunk(request, 1))
        return others

    def _schedule_prefills(self, step: ScheduledStep, prefills: list[Request], budget: int) -> int:
        used = 0
        for request in prefills:
            if used >= budget:
                break
            if request.status is not RUNNING:
                continue
            others = bool(self.waiting) or request is not self.running[-1]
            count = self._chunk_size(self._num_left(request), budget - used, others)
            if self._allocate_or_preempt(request, count, step):
                step.prefills.append(ScheduledChunk(request, count))
                used += count
        return used

    def _num_left(self, request: Request) -> int:
        """Tokens of a running request whose keys and values are not in the cache."""
        return request.num_tokens - int(self.batch.num_computed_tokens[request.row])

    def _chunk_size(self, num_left: int, budget: int, others: bool) -> int:
        """Tokens of a prefill to run: half of the budget while others want some of it too, so that short ones
        get through."""
        if others:
            budget = min(budget, max(self.kv.block_size, budget // 2))
        return min(num_left, budget)

    def _allocate(self, request: Request, num_new_tokens: int) -> bool:
        num_computed = int(self.batch.num_computed_tokens[request.row])
        return self.kv.allocate_slots(request.row, num_computed + num_new_tokens)

    def _allocate_or_preempt(self, request: Request, num_tokens: int, step: ScheduledStep) -> bool:
        """Allocate, preempting from the tail while the global pool is dry. False when the request itself had
        to go."""
        while not self._allocate(request, num_tokens):
            victim = max(reversed(self.running), key=_priority)  # the first of equals: the last admitted
            self._preempt(victim)
            step.num_preempted += 1
            step.drop(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        self._free(request)
        request.hidden_sum = None
        request.status = RequestStatus.PREEMPTED
        request.timings.num_preemptions += 1
        self.waiting.insert(bisect_left(self.waiting, request.spec.priority, key=_priority), request)
        self.stats.preemptions_total += 1

    def _schedule_waiting(self, step: ScheduledStep, budget: int) -> int:
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
            hit = self.kv.get_computed_blocks(request)
            if hit.pending:
                num_pending += 1
                # a running request computes the next block of this very prefix: wait for it, compute it once
                continue
            num_left = request.num_tokens - hit.num_tokens
            count = self._chunk_size(num_left, budget - used, others=request is not self.waiting[-1])
            target = hit.num_tokens + count if self.config.over_admission else request.num_tokens
            if not self._fits(self.kv.num_blocks_to_admit(hit, target)):
                self._may_admit = num_pending > 0
                break
            self._admit(request, hit)
            allocated = self._allocate(request, count)
            assert allocated, "admission counted too few blocks"
            if request.num_output_tokens > 0 and num_left == 1:
                # it was preempted, and finds all but its last token in the prefix cache
                step.decodes.append(request)
            else:
                step.prefills.append(ScheduledChunk(request, count))
            used += count
        return used

    def _fits(self, num_blocks: int) -> bool:
        """Whether admission leaves what running requests still need, and a watermark. Never says no when
        nothing runs."""
        free = self.kv.global_pool.num_free
        if not self.running or self.config.over_admission:
            return num_blocks <= free
        outstanding = sum(self.kv.num_blocks_outstanding(request) for request in self.running)
        return num_blocks + outstanding + self._watermark + len(self.running) <= free

    def _admit(self, request: Request, hit: PrefixHit) -> None:
        """Move a request from the waiting to the running, with a row and what the cache has of it."""
        self.waiting.remove(request)
        request.row = self.batch.add(
            request.token_ids,
            request.num_prompt_tokens,
            request.sampling,
            grammar=request.grammar,
            max_num_tokens=request.max_num_tokens,
            num_computed_tokens=hit.num_tokens,
        )
        self._request_of[request.row] = request
        self.running.append(request)
        self._running_rows, self._num_until_longest = None, 0
        self._stop_tokens[request.stop_token_ids] += 1
        self.kv.admit(request, hit)
        request.status = RequestStatus.RUNNING
        if not request.admitted:
            request.admitted = True
            request.num_cached_tokens = hit.num_tokens
            request.timings.first_scheduled = self.clock()
        if self.kv.prefix_caching:
            self.stats.prefix_queried_tokens_total += request.num_tokens
            self.stats.prefix_hit_tokens_total += hit.num_tokens
            if hit.limited_by is not None:
                self.stats.prefix_limited_total[hit.limited_by] += 1

    def _extend_prefills(self, step: ScheduledStep, budget: int) -> None:
        """Give what is left of the budget to the prefills already chosen, in their order."""
        for chunk in step.prefills:
            more = min(budget, self._num_left(chunk.request) - chunk.num_tokens)
            if more > 0 and self._allocate(chunk.request, chunk.num_tokens + more):
                chunk.num_tokens += more
                budget -= more

    def give_up(self, step: StepInput) -> None:
        """The step given out last is not run after all; the next one computes the same."""
        assert self._in_flight[-1] is step
        self._in_flight.pop()

    # -- update ----------------------------------------------------------------------------------------------

    def update(self, result: StepResult) -> StepOutputs:
        """Take the results of the oldest step in flight: advance, cache full blocks and free skipped ones,
        append sampled tokens, finish what is done."""
        step = self._in_flight.popleft()
        for request in self._held:
            self._free(request)
        self._held = []
        outputs = self._update_decodes(step, result)
        for index, chunk in enumerate(step.prefills, len(step.decodes)):
            owner = self._request_of[chunk.row]
            if owner is not None:
                self._update_prefill(owner, chunk, result[index], outputs)
        return outputs

    def _update_decodes(self, step: StepInput, result: StepResult) -> StepOutputs:
        """Arrays, but for requests that end or ask for more than their token."""
        rows, starts = step.decodes, step.starts
        drawn, others = result.token_ids[: len(rows)], result.others
        if rows is self._running_rows:  # as in most steps
            requests = self.running.copy()
        else:
            owners = [self._request_of[row] for row in rows.tolist()]
            requests = [owner for owner in owners if owner is not None]
            if len(requests) < len(owners):  # some have ended since the step was given out
                alive = [index for index, owner in enumerate(owners) if owner is not None]
                rows, starts = rows[alive], starts[alive]
                others = {new: others[old] for new, old in enumerate(alive) if old in others}
                drawn = drawn[alive]
        token_ids: list[int] = drawn.tolist()
        self.batch.last_token_ids[rows] = drawn
        outputs = StepOutputs(requests, token_ids)
        special = {index for index in others if index < len(rows)}
        if self._num_until_longest <= 1:
            self._num_until_longest = self._count_until_longest()
        self._num_until_longest -= 1
        if self._num_until_longest <= 0:
            special.update(np.flatnonzero(starts + 2 >= self.batch.max_num_tokens[rows]).tolist())
        if not all(ids.isdisjoint(token_ids) for ids in self._stop_tokens):
            special.update(i for i, r in enumerate(requests) if token_ids[i] in r.stop_token_ids)
        if not special:
            self._advance(requests, token_ids, rows, starts)
            self._decoding_rows = rows
            return outputs
        self._decoding_rows, self._num_until_longest = None, 0
        bare = [index for index in range(len(rows)) if index not in special]
        self._advance([requests[i] for i in bare], [token_ids[i] for i in bare], rows[bare], starts[bare])
        each = StepResult(drawn, others)
        for index in sorted(special):
            outputs.set_event(index, self._update_decode(requests[index], each[index]))
        return outputs

    def _advance(
        self, requests: list[Request], token_ids: list[int], rows: IntArray, starts: IntArray
    ) -> None:
        """The token at its start is computed, and each of the requests gets one more."""
        batch = self.batch
        num_computed = starts + 1
        batch.num_computed_tokens[rows] = num_computed
        batch.num_tokens[rows] = num_computed + 1
        for request, token_id in zip(requests, token_ids, strict=True):
            request.token_ids.append(token_id)
        full = np.flatnonzero(num_computed % self.kv.block_size == 0)
        if len(full):
            filling = [requests[index] for index in full.tolist()]
            self.kv.cache_full_blocks(filling, num_computed[full].tolist())

    def _update_decode(self, request: Request, result: ChunkResult) -> TokenOutput | RequestFailedError:
        num_computed = self._count_computed(request, 1)
        if result.error is not None:
            return self._fail(request, result.error)
        if num_computed % self.kv.block_size == 0:
            self.kv.cache_full_blocks([request], [num_computed])
        return self._append(request, result)

    def _update_prefill(
        self, request: Request, chunk: SequenceChunk, result: ChunkResult, outputs: StepOutputs
    ) -> None:
        self.stats.prefill_tokens_total += len(chunk.token_ids)
        num_computed = self._count_computed(request, len(chunk.token_ids))
        if result.error is not None:
            outputs.add(request, self._fail(request, result.error))
            return
        self.kv.cache_full_blocks([request], [num_computed])
        if result.hidden_sum is not None:
            request.hidden_sum = (
                result.hidden_sum if request.hidden_sum is None else request.hidden_sum + result.hidden_sum
            )
        # Positions recomputed after a preemption yield log-probabilities that are already there.
        request.prompt_logprobs.extend(
            result.prompt_logprobs[max(0, len(request.prompt_logprobs) - chunk.start) :]
        )
        if chunk.samples or num_computed == request.num_tokens:
            outputs.add(request, self._append(request, result))

    def _count_computed(self, request: Request, count: int) -> int:
        num_computed = int(self.batch.num_computed_tokens[request.row]) + count
        self.batch.num_computed_tokens[request.row] = num_computed
        return num_computed

    def _append(self, request: Request, result: ChunkResult) -> TokenOutput:
        output = append_result(request, result, self.clock)
        self.batch.num_tokens[request.row] = request.num_tokens
        self.batch.last_token_ids[request.row] = request.token_ids[-1]
        if output.finish_reason is not None:
            self._finish(request)
        return output

    def _fail(self, request: Request, error: str) -> RequestFailedError:
        self.stats.numerical_faults_total += error == NOT_FINITE
        self._finish(request)
        return RequestFailedError(error)

    # -- the end of a request --------------------------------------------------------------------------------

    def _finish(self, request: Request) -> None:
        self._leave(request)
        request.status = RequestStatus.FINISHED
        request.timings.finished = self.clock()
        del self.requests[request.request_id]
        if any((step.decodes == request.row).any() for step in self._in_flight):
            self._held.append(request)
        else:
            self._free(request)

    def _leave(self, request: Request) -> None:
        """Take a request off the running ones."""
        self.running.remove(request)
        self._running_rows = None
        self._stop_tokens[request.stop_token_ids] -= 1
        if not self._stop_tokens[request.stop_token_ids]:
            del self._stop_tokens[request.stop_token_ids]
        self._may_admit = True

    def _free(self, request: Request) -> None:
        self._request_of[request.row] = None
        self.kv.free(request)
        if request.status is RequestStatus.FINISHED:
            self.kv.forget(request)

    def _end_waiting(self, request: Request) -> None:
        self.waiting.remove(request)
        self._may_admit = True
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]
        self.kv.forget(request)

    # -- books -----------------------------------------------------------------------------------------------

    @property
    def _rows(self) -> IntArray:
        """Of the running requests, in order of admission. The same array until one comes or goes."""
        if self._running_rows is None:
            self._running_rows = _rows_of(self.running)
        return self._running_rows

    def _count_until_longest(self) -> int:
        num_left = self.batch.max_num_tokens[self._rows] - self.batch.num_tokens[self._rows]
        return int(num_left.min(initial=self.config.max_model_len))

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
        assert not self.requests
        assert not self.kv.num_known, "the cache remembers requests that have ended"
        self.kv.check_idle()

    def check_invariants(self) -> None:
        batch, block_size = self.batch, self.kv.block_size
        assert self._in_flight or not self._held, "blocks are held for a step that does not run"
        assert not {id(r) for r in self.waiting} & {id(r) for r in self.running}
        assert [r.row for r in self.running] == self._rows.tolist()
        assert self._num_until_longest <= self._count_until_longest(), "a request may end unnoticed"
        if self._decoding_rows is self._rows:
            has_one_left = batch.num_tokens[self._rows] - batch.num_computed_tokens[self._rows] == 1
            is_output = batch.num_tokens[self._rows] > batch.num_prompt_tokens[self._rows]
            assert (has_one_left & is_output).all(), "a request that does not decode"
        assert +self._stop_tokens == Counter(r.stop_token_ids for r in self.running)
        for request in self.running:
            row = request.row
            assert self._request_of[row] is request
            assert batch.token_ids[row] is request.token_ids
            assert (batch.num_tokens[row], batch.last_token_ids[row]) == (
                request.num_tokens,
                request.token_ids[-1],
            )
            num_computed = int(batch.num_computed_tokens[row])
            assert num_computed < request.num_tokens
            first = self.kv.spec.first_local_block(num_computed)
            assert self.kv.window.first_kept[row] >= first, "a block outside the window is still held"
            assert batch.num_blocks[row] * block_size >= num_computed
        self.kv.check_invariants([*self.running, *self._held])


def _rows_of(requests: Sequence[Request]) -> IntArray:
    return np.array([request.row for request in requests], dtype=np.int64)
