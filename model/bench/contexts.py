"""Decode steps to be timed: sequences of any context over a cache of just that size, with or without a text
in it.

What a step of greedy sequences costs depends on how sure the model is, so the network's own text stands in
the cache where that is timed: the last tokens of every context, as far as the window of local layers goes
back; keys and values before are zeros.
"""

from collections.abc import Sequence

import numpy as np

from model.execution.runner import ModelRunner
from model.interface.kv_cache_spec import KVCachePlan, KVCacheSpec, ceil_div
from model.interface.running_batch import GLOBAL, LOCAL, NULL_BLOCK, RunningBatch
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import SequenceChunk, StepInput, StepResult


def decode_step(runner: ModelRunner, num_seqs: int, context: int, sampling: SamplingParams) -> StepInput:
    """One new token for each sequence, whose context then counts ``context`` tokens."""
    spec = runner.spec
    start = context - 1
    total, local = ceil_div(context, spec.block_size), spec.blocks(start, 1).local_blocks
    batch = RunningBatch(num_seqs, total)
    for index in range(num_seqs):
        row = batch.add([1000 + index], 1, sampling)
        global_blocks = list(range(1 + index * total, 1 + (index + 1) * total))
        local_blocks = [NULL_BLOCK] * (total - local) + list(
            range(1 + index * local, 1 + (index + 1) * local)
        )
        batch.set_row_blocks(row, global_blocks, local_blocks)
    return StepInput(batch, np.arange(num_seqs), np.full(num_seqs, start), batch.last_token_ids.copy())


def plan_for(spec: KVCacheSpec, num_seqs: int, context: int) -> KVCachePlan:
    """A cache that holds so many sequences of so many tokens, and no more."""
    num_global = 1 + num_seqs * ceil_div(context, spec.block_size)
    num_local = 1 + num_seqs * spec.blocks(context - 1, 1).local_blocks
    return spec.plan_of_blocks(num_global, num_local)


def write_text(runner: ModelRunner, num_tokens: int) -> list[int]:
    """So many tokens of what the model writes after <bos> at temperature 1. Leaves no cache behind."""
    num_blocks = 1 + ceil_div(num_tokens, runner.spec.block_size)
    table = list(range(1, num_blocks))
    runner.allocate_cache(runner.spec.plan_of_blocks(num_blocks, num_blocks))  # no block is recycled
    sampling = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=0)
    token_ids = [runner.config.bos_token_id]
    batch = RunningBatch(1, len(table))
    row = batch.add(token_ids, 1, sampling)
    batch.set_row_blocks(row, table, table)
    for position in range(num_tokens - 1):
        step = StepInput(batch, np.array([row]), np.array([position]), np.array(token_ids[-1:]))
        token_ids += runner.run(step).token_ids.tolist()
    runner.release_cache()
    return token_ids


class Decodes:
    """Decode steps of sequences that all have the same text, whose last token is the one to be decoded."""

    def __init__(
        self, runner: ModelRunner, num_seqs: int, context: int, sampling: SamplingParams, text: Sequence[int]
    ) -> None:
        """Allocates the runner's cache. ``text``: at least a token."""
        self.runner = runner
        runner.allocate_cache(plan_for(runner.spec, num_seqs, context))
        self.step = decode_step(runner, num_seqs, context, sampling)
        self._clear_cache()
        self._write(text)
        self.step.token_ids = np.full(num_seqs, text[-1])

    def run(self) -> StepResult:
        """The step, over and over at the same place."""
        return self.runner.run(self.step)

    def _clear_cache(self) -> None:
        assert self.runner.cache is not None
        for layer in self.runner.cache.layers:
            layer.keys.zero_()
            layer.values.zero_()

    def _write(self, text: Sequence[int]) -> None:
        """The text before the first sequence's token, from where it gets to the others."""
        batch, block_size, cache = self.step.batch, self.runner.spec.block_size, self.runner.cache
        assert cache is not None
        start = int(self.step.starts[0])
        begin = int(np.flatnonzero(batch.blocks[LOCAL, 0])[0]) * block_size
        count = min(start - begin, len(text) - 1)
        if count:
            chunk = SequenceChunk(0, text[-1 - count : -1], start - count, samples=False)
            self.runner.run(StepInput(batch, prefills=[chunk]))
        for layer, is_global in zip(cache.layers, self.runner.config.global_layers, strict=True):
            tables = batch.blocks[GLOBAL if is_global else LOCAL]
            source, *others = (table[table != NULL_BLOCK].tolist() for table in tables)
            for blocks in others:
                layer.keys[blocks] = layer.keys[source]
                layer.values[blocks] = layer.values[source]
