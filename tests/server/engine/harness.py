"""An engine without a model: a runner whose tokens are a function of all tokens before, which checks the
cache it is given.

The runner keeps, per block id of each group, the tokens that were written to it. Before it "computes" a token
it verifies that every key the network would read (all positions for the global group, the window for the
local one) lies in the block the table names, with the right content. A block recycled too early, shared
wrongly or never computed is found at once.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from model.interface.grammar_state import Grammar, GrammarFault
from model.interface.kv_cache_spec import KVCacheSpec
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import (
    NOT_FINITE,
    ChunkResult,
    DecodeChunks,
    SampledTokens,
    SequenceChunk,
    StepMemoryError,
    TokenLogprobs,
)
from server.engine.core import EngineCore
from server.engine.kv.kv_manager import KVCacheManager
from server.engine.request import GenerationSpec, RequestFailedError, TokenOutput
from server.engine.scheduler.scheduler import SchedulerConfig

VOCAB = 1000


def next_token(tokens: Sequence[int], seed: int = 0) -> int:
    """A deterministic stand-in for the network: depends on every token before, and on the seed."""
    return int.from_bytes(hashlib.sha256(repr((list(tokens), seed)).encode()).digest()[:4], "big") % VOCAB


def sum_of_states(tokens: Sequence[int], start: int = 0) -> npt.NDArray[np.float64]:
    """A stand-in for hidden states that tells every token, its position and how often it was counted."""
    return np.array(
        [[token, position * token, 1] for position, token in enumerate(tokens, start)], dtype=np.float64
    ).sum(0)


class CheckingRunner:
    """Implements the Runner protocol. The whole token history is rebuilt from the cache, never from the
    request."""

    def __init__(self, spec: KVCacheSpec) -> None:
        self.spec = spec
        # (group, block, offset) -> the prefix that was computed there; a prefix names its position and all
        # tokens before it.
        self.written: dict[tuple[str, int, int], tuple[int, ...]] = {}
        self.steps: list[list[SequenceChunk]] = []
        self.num_computed: dict[tuple[int, ...], int] = {}
        self.fail_at_step: int | None = None
        self.memory: int | None = None  # tokens that one run has memory for
        self.num_refused = 0
        self.num_array_steps = 0
        self.is_odd: Callable[[tuple[int, ...]], bool] = lambda prefix: (
            False
        )  # whose logits after it are not finite

    def run(self, chunks: Sequence[SequenceChunk]) -> Sequence[ChunkResult]:
        self.steps.append(list(chunks))
        if self.fail_at_step is not None and len(self.steps) > self.fail_at_step:
            raise RuntimeError("planted fault")
        self._check_memory(sum(len(chunk.token_ids) for chunk in chunks))
        results = self._compute(list(chunks))
        if isinstance(chunks, DecodeChunks) and chunks.plain:  # then a real runner returns the bare tokens
            self._check_arrays(chunks)
            self.num_array_steps += 1
            return bare_tokens(results)
        return results

    def _check_memory(self, num_tokens: int) -> None:
        if self.memory is not None and num_tokens > self.memory:
            self.num_refused += 1
            raise StepMemoryError("planted lack of memory")

    def _compute(self, chunks: list[SequenceChunk]) -> list[ChunkResult]:
        prefixes = [self._write(chunk) for chunk in chunks]
        return [self._read(chunk, prefix) for chunk, prefix in zip(chunks, prefixes, strict=True)]

    def _check_arrays(self, decodes: DecodeChunks) -> None:
        """The arrays say what the chunks say, and the rows of the block tables what the tables say."""
        for index, chunk in enumerate(decodes):
            assert [decodes.token_ids[index]] == chunk.token_ids
            assert (decodes.starts[index], decodes.positions[index]) == (chunk.start, chunk.position)
            tables = (chunk.global_block_table, chunk.local_block_table)
            for rows, table in zip(decodes.tables.blocks[:, decodes.rows[index]], tables, strict=True):
                assert rows[: len(table)].tolist() == table

    def _slot(self, group: str, table: Sequence[int], position: int) -> tuple[str, int, int]:
        block = table[position // self.spec.block_size]
        assert block != 0, f"{group}: position {position} lies in the null block"
        return group, block, position % self.spec.block_size

    def _write(self, chunk: SequenceChunk) -> tuple[int, ...]:
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

    def _read(self, chunk: SequenceChunk, prefix: tuple[int, ...]) -> ChunkResult:
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
        if chunk.pools:
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


def bare_tokens(results: Sequence[ChunkResult]) -> SampledTokens:
    return SampledTokens([result.token_ids[0] if result.error is None else -1 for result in results])


class LazyRunner(CheckingRunner):
    """A device that has done nothing before it is asked for results, and then every step up to that one, in
    order: whatever the host changes too early is seen by the steps that it has launched. Blocks that a step
    uses must be held until then."""

    def __init__(self, spec: KVCacheSpec, kv: KVCacheManager) -> None:
        super().__init__(spec)
        self._kv = kv
        self._queue: list[LazyStep] = []
        self.num_launched_ahead = 0

    def launch(self, chunks: Sequence[SequenceChunk]) -> "LazyStep":
        assert len(self._queue) < 2, "more than one step ahead"
        self._check_memory(
            len(chunks) if isinstance(chunks, DecodeChunks) else sum(len(c.token_ids) for c in chunks)
        )
        self.num_launched_ahead += len(self._queue)
        step = LazyStep(self, chunks)
        self._queue.append(step)
        return step

    def run(self, chunks: Sequence[SequenceChunk]) -> Sequence[ChunkResult]:
        assert not self._queue, "parts of a step are run one by one"
        return super().run(chunks)

    def compute(self, wanted: "LazyStep") -> None:
        assert wanted is self._queue[0], "results are taken in the order of the launches"
        self._queue.pop(0)
        chunks = wanted.chunks()
        self.steps.append(chunks)
        wanted.computed = self._compute(chunks)

    def _slot(self, group: str, table: Sequence[int], position: int) -> tuple[str, int, int]:
        group, block, offset = super()._slot(group, table, position)
        pool = self._kv.global_pool if group == "global" else self._kv.local_pool
        assert pool.ref_count(block) > 0, (
            f"{group}: block {block} was freed before the step that uses it has run"
        )
        return group, block, offset


class LazyStep:
    """What the device was told at the launch; of tokens, perhaps only which step draws them."""

    def __init__(self, runner: LazyRunner, chunks: Sequence[SequenceChunk]) -> None:
        self._runner = runner
        self._bare = isinstance(chunks, DecodeChunks) and chunks.plain
        self.computed: list[ChunkResult] | None = None
        self._drawn = chunks.drawn if isinstance(chunks, DecodeChunks) else None
        if self._drawn is None:
            self._chunks = [
                replace(
                    c, global_block_table=[*c.global_block_table], local_block_table=[*c.local_block_table]
                )
                for c in chunks
            ]
            if isinstance(chunks, DecodeChunks) and chunks.plain:
                runner._check_arrays(chunks)
        else:
            assert isinstance(chunks, DecodeChunks)
            self._chunks = [self._chunk(chunks, index) for index in range(len(chunks))]
        runner.num_array_steps += self._bare

    def _chunk(self, chunks: DecodeChunks, index: int) -> SequenceChunk:
        start, tables = int(chunks.starts[index]), chunks.block_tables[index]
        for row, table in zip(chunks.tables.blocks[:, chunks.rows[index]], tables, strict=True):
            assert row[: len(table)].tolist() == table
        global_table, local_table = ([*table] for table in tables)
        position = int(chunks.positions[index])
        return SequenceChunk(
            [], start, global_table, local_table, chunks.sampling[index], samples=True, position=position
        )

    def chunks(self) -> list[SequenceChunk]:
        if self._drawn is not None:
            before = self._drawn.step
            assert isinstance(before, LazyStep)
            assert before.computed is not None, "a step was computed before the one whose tokens it takes"
            indices = range(len(self._chunks)) if self._drawn.chunks is None else self._drawn.chunks.tolist()
            assert len(indices) == len(self._chunks)
            assert self._drawn.chunks is not None or len(before.computed) == len(self._chunks)
            for chunk, index in zip(self._chunks, indices, strict=True):
                drawn = before.computed[index]
                chunk.token_ids = drawn.token_ids if drawn.error is None else [0]
        return self._chunks

    def results(self) -> Sequence[ChunkResult]:
        assert self.computed is None, "asked twice"
        self._runner.compute(self)
        assert self.computed is not None
        return bare_tokens(self.computed) if self._bare else self.computed


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
        self.kv = KVCacheManager(
            self.spec, num_global_blocks, num_local_blocks, prefix_caching=prefix_caching
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
        self.errors: dict[str, RequestFailedError] = {}
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
        pools: bool = False,
        priority: int = 0,
        **sampling: object,
    ) -> str:
        request_id = request_id or f"r{self.num_requests}"
        self.num_requests += 1
        params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
        self.outputs[request_id] = []
        self.core.add(
            GenerationSpec(
                request_id,
                list(prompt),
                params,
                cache_salt=salt,
                grammar=grammar,
                pools=pools,
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
