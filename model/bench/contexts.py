"""Decode steps to be timed: sequences of any context over a cache of just that size, with or without a text
in it.

What a step of greedy sequences costs depends on how sure the model is, so the network's own text stands in
the cache where that is timed: the last tokens of every context, as far as the window of local layers goes
back; keys and values before are zeros.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from model.execution.runner import ModelRunner
from model.interface.block_tables import BlockTableRows
from model.interface.kv_cache_spec import KVCachePlan, KVCacheSpec, ceil_div
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import ChunkResult, DecodeChunks, SequenceChunk


def decode_chunks(
    runner: ModelRunner, num_seqs: int, context: int, sampling: SamplingParams
) -> list[SequenceChunk]:
    """One new token for each sequence, whose context then counts ``context`` tokens."""
    spec = runner.spec
    start = context - 1
    total, local = ceil_div(context, spec.block_size), spec.blocks(start, 1).local_blocks
    chunks = []
    for index in range(num_seqs):
        global_table = list(range(1 + index * total, 1 + (index + 1) * total))
        local_table = [0] * (total - local) + list(range(1 + index * local, 1 + (index + 1) * local))
        chunks.append(SequenceChunk([1000 + index], start, global_table, local_table, sampling, samples=True))
    return chunks


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
    for position in range(num_tokens - 1):
        (result,) = runner.run(
            [SequenceChunk(token_ids[-1:], position, table, table, sampling, samples=True, position=position)]
        )
        token_ids += result.token_ids
    runner.release_cache()
    return token_ids


class Decodes:
    """Decode steps of sequences that all have the same text, whose last token is the one to be decoded."""

    def __init__(
        self, runner: ModelRunner, num_seqs: int, context: int, sampling: SamplingParams, text: Sequence[int]
    ) -> None:
        """Allocates the runner's cache. ``text``: at least a token."""
        self.runner = runner
        self._tables = BlockTableRows()
        runner.allocate_cache(plan_for(runner.spec, num_seqs, context))
        chunks = decode_chunks(runner, num_seqs, context, sampling)
        self._clear_cache()
        self._write(chunks, text)
        rows = []
        for chunk in chunks:
            rows.append(self._tables.take())
            self._tables.append(rows[-1], 0, list(chunk.global_block_table), list(chunk.local_block_table))
        self.chunks = DecodeChunks(
            [sampling] * num_seqs,
            [1] * num_seqs,
            self._tables,
            rows,
            [(chunk.global_block_table, chunk.local_block_table) for chunk in chunks],
            plain=True,
            make_chunk=lambda index: chunks[index],
        )
        self.chunks.move(
            np.full(num_seqs, text[-1], dtype=np.int64), np.full(num_seqs, context - 1, dtype=np.int64)
        )

    def run(self) -> Sequence[ChunkResult]:
        """The step, over and over at the same place."""
        self._tables.next_step()
        return self.runner.run(self.chunks)

    def _clear_cache(self) -> None:
        assert self.runner.cache is not None
        for layer in self.runner.cache.layers:
            layer.keys.zero_()
            layer.values.zero_()

    def _write(self, chunks: Sequence[SequenceChunk], text: Sequence[int]) -> None:
        """The text before the first sequence's token, from where it gets to the others."""
        first, block_size, cache = chunks[0], self.runner.spec.block_size, self.runner.cache
        assert cache is not None
        begin = next(index for index, block in enumerate(first.local_block_table) if block) * block_size
        count = min(first.start - begin, len(text) - 1)
        if count:
            token_ids = text[-1 - count : -1]
            self.runner.run([replace(first, token_ids=token_ids, start=first.start - count, samples=False)])
        for layer, is_global in zip(cache.layers, self.runner.config.global_layers, strict=True):
            tables = [chunk.global_block_table if is_global else chunk.local_block_table for chunk in chunks]
            source, *others = ([block for block in table if block] for table in tables)
            for blocks in others:
                layer.keys[blocks] = layer.keys[source]
                layer.values[blocks] = layer.values[source]
