"""Drives a ModelRunner as an engine would, with the least bookkeeping that is honest: blocks handed out in
shuffled order, local blocks recycled right after every step, and all memory that no sequence owns poisoned
with NaN, so that a read of anything stale or unwritten shows in the logits.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from model.config.gemma3_config import Gemma3Config
from model.execution.runner import ModelRunner
from model.interface.kv_cache_spec import KVCachePlan
from model.interface.running_batch import LOCAL, NULL_BLOCK, RunningBatch
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import ChunkResult, SequenceChunk, StepInput
from model.network.gemma3 import Gemma3
from model.ops.interface import Ops

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
MIN_ROWS = 16


@dataclass(eq=False)
class TestSequence:
    """One sequence's tokens and where its keys and values lie."""

    __test__ = False

    tokens: list[int]
    sampling: SamplingParams = GREEDY
    num_prompt_tokens: int = 0
    num_computed: int = 0
    row: int | None = None  # of the harness's batch, once it has blocks
    global_table: list[int] = field(default_factory=list)
    local_table: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)


class Harness:
    """A model with a cache of its own, poisoned wherever nothing was written."""

    def __init__(
        self, model: Gemma3, ops: Ops, *, block_size: int, num_tokens: int, num_seqs: int = 1, seed: int = 0
    ) -> None:
        config = model.config
        self.runner = ModelRunner(model, config.kv_cache_spec(block_size, ops.cache_dtype.itemsize), ops)
        self.spec = self.runner.spec
        self.config: Gemma3Config = config
        num_global = 1 + -(-num_tokens // block_size) + num_seqs
        num_local = min(num_global, self.spec.local_pool_blocks(num_seqs, num_tokens))
        self.runner.allocate_cache(KVCachePlan(num_global, num_local, 0, 0, num_tokens))
        assert self.runner.cache is not None
        self.cache = self.runner.cache
        for layer in self.cache.layers:
            layer.keys.fill_(torch.nan)
            layer.values.fill_(torch.nan)
        shuffle = random.Random(seed).shuffle
        self.free = {True: list(range(1, num_global)), False: list(range(1, num_local))}
        shuffle(self.free[True])
        shuffle(self.free[False])
        self.recycled = 0
        self.batch = RunningBatch(max(MIN_ROWS, num_seqs), num_global)

    def chunk(self, sequence: TestSequence, num_tokens: int, *, score: bool = False) -> SequenceChunk:
        """The sequence's next ``num_tokens`` as a chunk, with blocks for them."""
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        assert num_tokens > 0
        assert end <= len(sequence.tokens)
        num_blocks = -(-end // self.spec.block_size)
        prompt = sequence.num_prompt_tokens
        if sequence.row is None:
            sequence.row = self.batch.add(sequence.tokens, prompt, sequence.sampling)
        row, held = sequence.row, len(sequence.global_table)
        for is_global, table in ((True, sequence.global_table), (False, sequence.local_table)):
            while len(table) < num_blocks:
                table.append(self.free[is_global].pop())
        if num_blocks > held:
            self.batch.set_row_blocks(row, sequence.global_table[held:], sequence.local_table[held:])
        self.batch.set_sampling(row, sequence.sampling)
        self.batch.num_tokens[row] = len(sequence.tokens)
        self.batch.last_token_ids[row] = sequence.tokens[-1]
        return SequenceChunk(
            row=row,
            token_ids=sequence.tokens[start:end],
            start=start,
            samples=end == len(sequence.tokens),
            prompt_targets=sequence.tokens[start + 1 : min(end + 1, prompt)] if score else (),
        )

    def step_of(self, chunks: Sequence[SequenceChunk]) -> StepInput:
        """A step of these chunks, in this order."""
        return StepInput(self.batch, prefills=chunks)

    def run_chunks(self, chunks: Sequence[SequenceChunk]) -> list[ChunkResult]:
        """One step through ModelRunner.run: a result per chunk."""
        results = self.runner.run(self.step_of(chunks)).all()
        self.batch.changes.clear()
        return results

    def run(self, work: Sequence[tuple[TestSequence, int]], *, score: bool = False) -> list[ChunkResult]:
        """One step through ModelRunner.run: (sequence, number of its next tokens) each."""
        results = self.run_chunks([self.chunk(sequence, count, score=score) for sequence, count in work])
        self._advance(work)
        return results

    @torch.inference_mode()
    def hidden(self, work: Sequence[tuple[TestSequence, int]]) -> list[torch.Tensor]:
        """One step that returns the final hidden states [count, h] of every token instead of sampling."""
        step = StepInput(self.batch, prefills=[self.chunk(sequence, count) for sequence, count in work])
        hidden = self.runner.hidden_states(step)
        self.batch.changes.clear()
        self._advance(work)
        return list(torch.split(hidden, [count for _, count in work]))

    @torch.inference_mode()
    def logits(self, work: Sequence[tuple[TestSequence, int]]) -> list[torch.Tensor]:
        """The same with the logits [count, V] of every token."""
        return [self.runner.model.logits(hidden) for hidden in self.hidden(work)]

    def all_logits(self, tokens: Sequence[int], chunk_size: int | None = None) -> torch.Tensor:
        """Logits [len(tokens), V] of one sequence run alone in chunks; its blocks are released afterwards."""
        sequence = TestSequence(list(tokens))
        pieces = []
        while sequence.num_computed < len(tokens):
            count = min(chunk_size or len(tokens), len(tokens) - sequence.num_computed)
            pieces += self.logits([(sequence, count)])
        self.release(sequence)
        return torch.cat(pieces)

    def release(self, sequence: TestSequence) -> None:
        for is_global, table in ((True, sequence.global_table), (False, sequence.local_table)):
            self._free(is_global, [block for block in table if block])
            table.clear()
        if sequence.row is not None:
            self.batch.remove(sequence.row)
            sequence.row = None

    def _advance(self, work: Sequence[tuple[TestSequence, int]]) -> None:
        for sequence, count in work:
            sequence.num_computed += count
            kept = self.spec.first_local_block(sequence.num_computed)
            recycled = [block for block in sequence.local_table[:kept] if block]
            sequence.local_table[:kept] = [0] * kept
            assert sequence.row is not None
            self.batch.blocks[LOCAL, sequence.row, :kept] = NULL_BLOCK
            self.recycled += len(recycled)
            self._free(False, recycled)
            held = len([block for block in sequence.local_table if block])
            assert held == self.spec.blocks(sequence.num_computed).local_blocks

    def _free(self, is_global: bool, blocks: list[int]) -> None:
        """Back to the pool: poisoned, and first in line to be handed out again."""
        for kind, layer in zip(self.config.global_layers, self.cache.layers, strict=True):
            if kind == is_global:
                layer.keys[blocks] = torch.nan
                layer.values[blocks] = torch.nan
        self.free[is_global] += blocks


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Largest absolute difference; NaN never passes."""
    assert actual.shape == expected.shape
    difference = (actual - expected).abs().max().item()
    assert difference <= tolerance, f"largest difference {difference}"
