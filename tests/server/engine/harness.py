"""An engine without a model: a runner whose tokens are a function of all tokens before, which checks the
cache it is given.

The runner keeps, per block id of each group, the tokens that were written to it. Before it "computes" a token
it verifies that every key the network would read (all positions for the global group, the window for the
local one) lies in the block the table names, with the right content. A block recycled too early, shared
wrongly or never computed is found at once.
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from model.interface.grammar_state import Grammar, GrammarFault
from model.interface.kv_cache_spec import KVCacheSpec
from model.interface.running_batch import GLOBAL, LOCAL, RunningBatch
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import (
    NO_TOKEN,
    NOT_FINITE,
    ChunkResult,
    StepInput,
    StepMemoryError,
    StepResult,
    TokenLogprobs,
)
from server.engine.core import EngineCore
from server.engine.kv.kv_manager import KVCacheManager
from server.engine.request import (
    NO_ROW,
    EngineRequest,
    Request,
    RequestExpiredError,
    RequestFailedError,
    TokenOutput,
)
from server.engine.scheduler.scheduler import SchedulerConfig
from tests.steps import StepSequence, sequences_of

VOCAB = 1000


def next_token(tokens: Sequence[int], seed: int = 0) -> int:
    """A deterministic stand-in for the network: depends on every token before, and on the seed."""
    return int.from_bytes(hashlib.sha256(repr((list(tokens), seed)).encode()).digest()[:4], "big") % VOCAB


def sum_of_states(tokens: Sequence[int], start: int = 0) -> npt.NDArray[np.float64]:
    """A stand-in for hidden states that tells every token, its position and how often it was counted."""
    states = np.array(
        [[token, position * token, 1] for position, token in enumerate(tokens, start)], dtype=np.float64
    )
    total: npt.NDArray[np.float64] = states.sum(0)
    return total


class TableMirror:
    """Block tables as a device keeps them: told nothing but what the batch says has changed."""

    def __init__(self, batch: RunningBatch) -> None:
        self.batch = batch
        self._tables = np.zeros_like(batch.blocks)

    def update(self) -> None:
        rows, indices = self.batch.changes.rows, self.batch.changes.indices
        self._tables[:, rows, indices] = self.batch.blocks[:, rows, indices]

    def table(self, group: int, row: int) -> list[int]:
        blocks: list[int] = self._tables[group, row, : self.batch.num_blocks[row]].tolist()
        return blocks


class CheckingRunner:
    """Implements the Runner protocol. The whole token history is rebuilt from the cache, never from the
    request."""

    def __init__(self, spec: KVCacheSpec) -> None:
        self.spec = spec
        # (group, block, offset) -> the prefix that was computed there; a prefix names its position and all
        # tokens before it.
        self.written: dict[tuple[str, int, int], tuple[int, ...]] = {}
        self.steps: list[list[StepSequence]] = []
        self.num_computed: dict[tuple[int, ...], int] = {}
        self.fail_at_step: int | None = None
        self.memory: int | None = None  # tokens that one run has memory for
        self.num_refused = 0
        self.num_array_steps = 0  # in which every sequence draws a token and nothing else is wanted
        # Whose logits after it are not finite.
        self.is_odd: Callable[[tuple[int, ...]], bool] = lambda prefix: False
        self._mirror: TableMirror | None = None

    def run(self, step: StepInput) -> StepResult:
        sequences = self._look_at(step)
        self.steps.append(sequences)
        if self.fail_at_step is not None and len(self.steps) > self.fail_at_step:
            raise RuntimeError("planted fault")
        self._check_memory(step.num_tokens)
        self._count_arrays(step)
        return step_result(self._compute(sequences), step.is_plain)

    def _look_at(self, step: StepInput) -> list[StepSequence]:
        """The step's sequences, with block tables as the device has them."""
        self._check_arrays(step)
        if self._mirror is None or self._mirror.batch is not step.batch:
            self._mirror = TableMirror(step.batch)
        self._mirror.update()
        sequences = sequences_of(step)
        for sequence in sequences:
            sequence.global_block_table = self._mirror.table(GLOBAL, sequence.row)
            sequence.local_block_table = self._mirror.table(LOCAL, sequence.row)
        return sequences

    def _check_memory(self, num_tokens: int) -> None:
        if self.memory is not None and num_tokens > self.memory:
            self.num_refused += 1
            raise StepMemoryError("planted lack of memory")

    def _count_arrays(self, step: StepInput) -> None:
        self.num_array_steps += not step.prefills and bool(step.is_plain.all())

    def _compute(self, sequences: list[StepSequence]) -> list[ChunkResult]:
        prefixes = [self._write(sequence) for sequence in sequences]
        return [self._read(sequence, prefix) for sequence, prefix in zip(sequences, prefixes, strict=True)]

    def _check_arrays(self, step: StepInput) -> None:
        """The arrays say what the lists of tokens say."""
        batch = step.batch
        assert len(set(step.rows.tolist())) == len(step), "a sequence is twice in a step"
        for index, row in enumerate(step.decodes.tolist()):
            known = batch.token_ids[row]
            assert batch.num_tokens[row] == len(known)
            assert batch.last_token_ids[row] == known[-1]
            if step.token_ids is None:
                assert step.starts[index] == len(known)
            else:
                assert (step.token_ids[index], step.starts[index]) == (known[-1], len(known) - 1)
            assert batch.is_plain[row] == (batch.sampling[row].plain and batch.grammars[row] is None)
        for chunk in step.prefills:
            known = batch.token_ids[chunk.row]
            assert list(chunk.token_ids) == known[chunk.start : chunk.start + len(chunk.token_ids)]

    def _slot(self, group: str, table: Sequence[int], position: int) -> tuple[str, int, int]:
        block = table[position // self.spec.block_size]
        assert block != 0, f"{group}: position {position} lies in the null block"
        return group, block, position % self.spec.block_size

    def _write(self, chunk: StepSequence) -> tuple[int, ...]:
        prefix: tuple[int, ...] = ()
        if chunk.start:
            prefix = self.written[self._slot("global", chunk.global_block_table, chunk.start - 1)]
            assert len(prefix) == chunk.start, "the block before the chunk holds another position"
        for token in chunk.token_ids:
            prefix = (*prefix, token)
            position = len(prefix) - 1
            self.written[self._slot("global", chunk.global_block_table, position)] = prefix
            self.written[self._slot("local", chunk.local_block_table, position)] = prefix
            self.num_computed[prefix] = self.num_computed.get(prefix, 0) + 1
        return prefix

    def _read(self, chunk: StepSequence, prefix: tuple[int, ...]) -> ChunkResult:
        window_start = max(0, chunk.start - self.spec.sliding_window + 1)
        for position in range(len(prefix)):
            expected = prefix[: position + 1]
            assert self.written[self._slot("global", chunk.global_block_table, position)] == expected, (
                "global content differs"
            )
            if position >= window_start:
                assert self.written[self._slot("local", chunk.local_block_table, position)] == expected, (
                    "local content differs"
                )
        result = ChunkResult()
        if chunk.pooling:
            result.hidden_sum = sum_of_states(prefix[chunk.start :], chunk.start)
        if chunk.samples and self.is_odd(prefix):
            return ChunkResult(error=NOT_FINITE)
        if chunk.samples:
            token = next_token(prefix, chunk.sampling.seed + chunk.sampling.choice)
            if chunk.grammar is not None:
                try:
                    mask = chunk.grammar.mask()
                except GrammarFault as error:
                    return ChunkResult(error=str(error))
                if mask is None:
                    return result
                allowed = [i for i in range(8 * len(mask)) if mask[i >> 3] >> (i & 7) & 1]
                token = allowed[token % len(allowed)]
            result.token_ids.append(token)
            if chunk.sampling.logprobs is not None:
                result.logprobs.append(TokenLogprobs(token, -float(len(prefix)), []))
        for index, target in enumerate(chunk.prompt_targets):
            result.prompt_logprobs.append(TokenLogprobs(target, -float(chunk.start + index), []))
        return result


def step_result(results: Sequence[ChunkResult], is_plain: npt.NDArray[np.bool_]) -> StepResult:
    """As of a real runner: of plain draws the bare tokens."""
    token_ids = [
        result.token_ids[0] if plain and result.error is None else NO_TOKEN
        for result, plain in zip(results, is_plain.tolist(), strict=True)
    ]
    others = {index: results[index] for index in np.flatnonzero(~is_plain).tolist()}
    return StepResult(np.array(token_ids, dtype=np.int64), others)


class LazyRunner(CheckingRunner):
    """A device that has done nothing before it is asked for results, and then every step up to that one, in
    order: whatever the host changes too early is seen by the steps that it has launched. Blocks that a step
    uses must be held until then."""

    def __init__(self, spec: KVCacheSpec, kv: KVCacheManager) -> None:
        super().__init__(spec)
        self._kv = kv
        self._queue: list[LazyStep] = []
        self.sampled: dict[int, int] = {}  # row -> the token drawn there last
        self.num_launched_ahead = 0

    def launch(self, step: StepInput) -> "LazyStep":
        assert len(self._queue) < 2, "more than one step ahead"
        self._check_memory(step.num_tokens)
        self.num_launched_ahead += len(self._queue)
        self._count_arrays(step)
        launched = LazyStep(self, self._look_at(step), step.is_plain, are_known=step.token_ids is not None)
        self._queue.append(launched)
        return launched

    def run(self, step: StepInput) -> StepResult:
        assert not self._queue, "parts of a step are run one by one"
        return super().run(step)

    def compute(self, wanted: "LazyStep") -> list[ChunkResult]:
        assert wanted is self._queue[0], "results are taken in the order of the launches"
        self._queue.pop(0)
        for sequence in wanted.sequences:
            if not wanted.are_known:
                sequence.token_ids = [self.sampled[sequence.row]]
        self.steps.append(wanted.sequences)
        results = self._compute(wanted.sequences)
        for sequence, result, plain in zip(wanted.sequences, results, wanted.is_plain.tolist(), strict=True):
            if plain:
                self.sampled[sequence.row] = result.token_ids[0] if result.error is None else 0
        return results

    def _slot(self, group: str, table: Sequence[int], position: int) -> tuple[str, int, int]:
        group, block, offset = super()._slot(group, table, position)
        pool = self._kv.global_pool if group == "global" else self._kv.local_pool
        assert pool.ref_count(block) > 0, (
            f"{group}: block {block} was freed before the step that uses it has run"
        )
        return group, block, offset


class LazyStep:
    """What the device was told at the launch. Of tokens, perhaps only that it has drawn them, or is going
    to."""

    def __init__(
        self,
        runner: LazyRunner,
        sequences: list[StepSequence],
        is_plain: npt.NDArray[np.bool_],
        *,
        are_known: bool,
    ) -> None:
        self._runner = runner
        self.sequences = sequences
        self.is_plain = is_plain
        self.are_known = are_known
        self._is_taken = False

    def results(self) -> StepResult:
        assert not self._is_taken, "asked twice"
        self._is_taken = True
        return step_result(self._runner.compute(self), self.is_plain)


def make_spec(block_size: int = 4, window: int = 8) -> KVCacheSpec:
    return KVCacheSpec(
        block_size, window, num_global_layers=1, num_local_layers=5, bytes_per_token_per_layer=8
    )


class Harness:
    """An EngineCore over the checking runner, with pools of a chosen size."""

    def __init__(
        self,
        *,
        block_size: int = 4,
        window: int = 8,
        num_global_blocks: int = 65,
        num_local_blocks: int | None = None,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_model_len: int | None = None,
        prefix_caching: bool = True,
        over_admission: bool = False,
        async_scheduling: bool = False,
    ) -> None:
        """``async_scheduling``: over a LazyRunner."""
        self.spec = make_spec(block_size, window)
        if num_local_blocks is None:
            num_local_blocks = self.spec.local_pool_blocks(max_num_seqs, max_num_batched_tokens)
        limit = (num_global_blocks - 1) * block_size
        limit = min(limit, max_model_len or limit)
        batch = RunningBatch(max_num_seqs, self.spec.global_blocks(limit))
        self.kv = KVCacheManager(
            self.spec, batch, num_global_blocks, num_local_blocks, prefix_caching=prefix_caching
        )
        capacity = self.kv.capacity_tokens
        self.config = SchedulerConfig(
            max_num_seqs,
            max_num_batched_tokens,
            min(capacity, max_model_len or capacity),
            over_admission=over_admission,
        )
        self.runner = LazyRunner(self.spec, self.kv) if async_scheduling else CheckingRunner(self.spec)
        self.time = 0.0
        self.core = EngineCore(
            self.runner,
            self.kv,
            self.config,
            clock=self._clock,
            debug_invariants=True,
            async_scheduling=async_scheduling,
        )
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.errors: dict[str, RequestFailedError | RequestExpiredError] = {}
        self.num_requests = 0

    def _clock(self) -> float:
        self.time += 1.0
        return self.time

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        salt: str | None = None,
        request_id: str | None = None,
        grammar: Grammar | None = None,
        pooling: bool = False,
        priority: int = 0,
        **sampling: object,
    ) -> str:
        request_id = request_id or f"r{self.num_requests}"
        self.num_requests += 1
        params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
        self.outputs[request_id] = []
        self.core.add(
            EngineRequest(
                request_id,
                list(prompt),
                params,
                cache_salt=salt,
                grammar=grammar,
                pooling=pooling,
                priority=priority,
            )
        )
        return request_id

    def step(self) -> None:
        for request, event in self.core.step():
            if isinstance(event, TokenOutput):
                self.outputs[request.request_id].append(event)
            else:
                self.errors[request.request_id] = event

    def run(self, max_steps: int = 10_000) -> None:
        """Run until nothing is left; a scheduler that stops moving fails the test instead of hanging it."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("the engine did not finish its work")

    def num_computed(self, request: Request) -> int:
        """Tokens of a request whose keys and values are in the cache."""
        return 0 if request.row == NO_ROW else int(self.kv.batch.num_computed_tokens[request.row])

    def num_uncomputed(self, request: Request) -> int:
        return request.num_tokens - self.num_computed(request)

    def holds_blocks(self, request_id: str) -> bool:
        scheduler = self.core.scheduler
        return request_id in [request.request_id for request in (*scheduler.running, *scheduler._held)]

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def finish_reason(self, request_id: str) -> str | None:
        return self.outputs[request_id][-1].finish_reason


def expected_tokens(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """What a solo run without any cache generates."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]
