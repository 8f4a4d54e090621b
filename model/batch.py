"""SequenceChunks (plain Python) to one ForwardBatch (tensors): the flat batch that the network runs.

The chunks lie one after the other; nothing is padded but the block tables. Everything is laid out on the host and moved once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from model.kv_cache_spec import KVCacheSpec
from model.ops import AttentionMetadata
from model.sequence_chunk import SequenceChunk


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's tokens and how they map onto both groups of the cache."""

    token_ids: torch.Tensor  # int64 [n]
    positions: torch.Tensor  # int64 [n]
    global_attention: AttentionMetadata
    local_attention: AttentionMetadata
    first_rows: tuple[int, ...]  # row of each chunk's first token in the flat batch, and the total at the end


def build_batch(chunks: Sequence[SequenceChunk], spec: KVCacheSpec, device: torch.device) -> ForwardBatch:
    """Lay the chunks out flat. Every chunk has at least one token, and blocks for all of them."""
    query_lens = tuple(len(chunk.token_ids) for chunk in chunks)
    assert all(query_lens), "a chunk without tokens"
    context_lens = tuple(chunk.start + length for chunk, length in zip(chunks, query_lens, strict=True))
    first_rows = (0, *accumulate(query_lens))
    token_ids = np.concatenate([np.asarray(chunk.token_ids, dtype=np.int64) for chunk in chunks])
    positions = np.concatenate([np.arange(c.start, end, dtype=np.int64) for c, end in zip(chunks, context_lens, strict=True)])
    sequences = np.repeat(np.arange(len(chunks)), query_lens)
    query_start = torch.tensor(first_rows, dtype=torch.int32).to(device)
    context_lens_tensor = torch.tensor(context_lens, dtype=torch.int32).to(device)

    def attention(tables: list[Sequence[int]], window: int | None) -> AttentionMetadata:
        # A local layer reads nothing before its first query's window, so the head of a long table is not even copied.
        first_blocks = [0 if window is None else max(0, c.start - window + 1) // spec.block_size for c in chunks]
        block_table = _block_table(tables, first_blocks, [-(-context // spec.block_size) for context in context_lens])
        blocks = block_table[sequences, positions // spec.block_size]
        assert blocks.all(), "a token is to be written to the null block"
        slot_mapping = blocks.astype(np.int64) * spec.block_size + positions % spec.block_size
        return AttentionMetadata(
            window=window,
            block_size=spec.block_size,
            query_lens=query_lens,
            context_lens=context_lens,
            query_start=query_start,
            context_lens_tensor=context_lens_tensor,
            block_table=torch.from_numpy(block_table).to(device),
            slot_mapping=torch.from_numpy(slot_mapping).to(device),
        )

    return ForwardBatch(
        token_ids=torch.from_numpy(token_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        global_attention=attention([chunk.global_block_table for chunk in chunks], None),
        local_attention=attention([chunk.local_block_table for chunk in chunks], spec.sliding_window),
        first_rows=first_rows,
    )


def _block_table(tables: list[Sequence[int]], first_blocks: list[int], ends: list[int]) -> np.ndarray:
    """int32 [num_seqs, max_blocks], zero outside [first, end) of each sequence."""
    padded = np.zeros((len(tables), max(ends)), dtype=np.int32)
    for row, table, first, end in zip(padded, tables, first_blocks, ends, strict=True):
        row[first:end] = table[first:end]
    return padded
