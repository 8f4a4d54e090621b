"""SequenceChunks (plain Python) to one ForwardBatch (tensors): the flat batch that the network runs.

The chunks lie one after the other; nothing is padded but the block tables. Everything is laid out on the host and moved once, by
operations on whole arrays: a batch of hundreds of decodes has no loop over them but those that read their fields.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from model.kv_cache_spec import KVCacheSpec
from model.ops import AttentionMetadata
from model.sequence_chunk import DecodeChunks, SequenceChunk


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
    num_seqs, block_size = len(chunks), spec.block_size
    if isinstance(chunks, DecodeChunks):
        token_ids, positions, ends = chunks.token_ids, chunks.starts, chunks.starts + 1
        sequences = np.arange(num_seqs)
        query_lens, first_rows = (1,) * num_seqs, tuple(range(num_seqs + 1))
        query_starts = np.arange(num_seqs + 1, dtype=np.int32)
    else:
        query_lens = tuple(len(chunk.token_ids) for chunk in chunks)
        assert all(query_lens), "a chunk without tokens"
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        token_ids = np.concatenate([np.asarray(chunk.token_ids, dtype=np.int64) for chunk in chunks])
        lengths = np.array(query_lens, dtype=np.int64)
        first_rows = (0, *accumulate(query_lens))
        query_starts = np.array(first_rows, dtype=np.int32)
        ends = starts + lengths
        sequences = np.repeat(np.arange(num_seqs), lengths)
        positions = np.arange(len(token_ids)) + (starts - first_rows[:-1])[sequences]
    context_lens = tuple(ends.tolist())
    query_start = to_device(query_starts, device)
    context_lens_tensor = to_device(ends.astype(np.int32), device)
    block_indices, offsets = positions // block_size, positions % block_size
    width = -(-int(ends.max()) // block_size)

    def attention(block_table: npt.NDArray[np.int32], window: int | None) -> AttentionMetadata:
        blocks = block_table[sequences, block_indices]
        assert blocks.all(), "a token is to be written to the null block"
        return AttentionMetadata(
            window=window,
            block_size=block_size,
            query_lens=query_lens,
            context_lens=context_lens,
            query_start=query_start,
            context_lens_tensor=context_lens_tensor,
            block_table=to_device(block_table, device),
            slot_mapping=to_device(blocks.astype(np.int64) * block_size + offsets, device),
        )

    global_table, local_table = _block_tables(chunks, width)
    return ForwardBatch(
        token_ids=to_device(token_ids, device),
        positions=to_device(positions, device),
        global_attention=attention(global_table, None),
        local_attention=attention(local_table, spec.sliding_window),
        first_rows=first_rows,
    )


def _block_tables(chunks: Sequence[SequenceChunk], width: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Of both groups, int32 [num_seqs, width]. What a sequence doesn't have, or has no more, is zero."""
    if isinstance(chunks, DecodeChunks):
        return chunks.tables.global_blocks[chunks.rows, :width], chunks.tables.local_blocks[chunks.rows, :width]
    tables = chunks[0].tables
    if tables is not None:
        rows = np.array([chunk.row for chunk in chunks])
        return tables.global_blocks[rows, :width], tables.local_blocks[rows, :width]
    both = np.zeros((2, len(chunks), width), dtype=np.int32)
    for index, chunk in enumerate(chunks):
        for padded, table in zip(both, (chunk.global_block_table, chunk.local_block_table), strict=True):
            padded[index, : len(table)] = table[:width]
    return both[0], both[1]


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor of an array that nobody writes to any more: its own memory on a CPU, else a copy that is not waited for."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":  # from other than pinned memory, the host would wait until the device has done all its work
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
