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

from model.block_tables import GLOBAL, LOCAL
from model.kv_cache_spec import KVCacheSpec
from model.ops import AttentionMetadata
from model.sequence_chunk import DecodeChunks, SequenceChunk

SPARE_WIDTH = 64  # columns that decodes can grow into before their tables are copied anew


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
        layout = chunks.scratch.get("layout")
        if layout is None:
            first_rows = tuple(range(num_seqs + 1))
            query_start = to_device(np.array(first_rows, dtype=np.int32), device)
            layout = chunks.scratch["layout"] = np.arange(num_seqs), (1,) * num_seqs, first_rows, query_start
        sequences, query_lens, first_rows, query_start = layout
    else:
        query_lens = tuple(len(chunk.token_ids) for chunk in chunks)
        assert all(query_lens), "a chunk without tokens"
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        token_ids = np.concatenate([np.asarray(chunk.token_ids, dtype=np.int64) for chunk in chunks])
        lengths = np.array(query_lens, dtype=np.int64)
        first_rows = (0, *accumulate(query_lens))
        query_start = to_device(np.array(first_rows, dtype=np.int32), device)
        ends = starts + lengths
        sequences = np.repeat(np.arange(num_seqs), lengths)
        positions = np.arange(len(token_ids)) + (starts - first_rows[:-1])[sequences]
    context_lens = tuple(ends.tolist())
    context_lens_tensor = to_device(ends.astype(np.int32), device)
    block_indices, offsets = positions // block_size, positions % block_size
    width = -(-int(ends.max()) // block_size)

    block_tables, blocks = _block_tables(chunks, width, sequences, block_indices, device)

    def attention(group: int, window: int | None) -> AttentionMetadata:
        assert blocks[group].all(), "a token is to be written to the null block"
        return AttentionMetadata(
            window=window,
            block_size=block_size,
            query_lens=query_lens,
            context_lens=context_lens,
            query_start=query_start,
            context_lens_tensor=context_lens_tensor,
            block_table=block_tables[group],
            slot_mapping=to_device(blocks[group].astype(np.int64) * block_size + offsets, device),
        )

    return ForwardBatch(
        token_ids=to_device(token_ids, device),
        positions=to_device(positions, device),
        global_attention=attention(GLOBAL, None),
        local_attention=attention(LOCAL, spec.sliding_window),
        first_rows=first_rows,
    )


Tables = tuple[torch.Tensor | Sequence[torch.Tensor], Sequence[npt.NDArray[np.int32]]]


def _block_tables(
    chunks: Sequence[SequenceChunk],
    width: int,
    sequences: npt.NDArray[np.int64],
    block_indices: npt.NDArray[np.int64],
    device: torch.device,
) -> Tables:
    """For each group, int32 [num_seqs, width or more], zero where a sequence has no block, or has it no more; and the block of
    each token."""
    if isinstance(chunks, DecodeChunks):
        blocks = chunks.tables.blocks
        return _tables_of_decodes(chunks, width, device), [blocks[group, chunks.rows, block_indices] for group in (GLOBAL, LOCAL)]
    tables = chunks[0].tables
    if tables is not None:
        rows = np.array([chunk.row for chunk in chunks])
        padded = [tables.blocks[group, rows, :width] for group in (GLOBAL, LOCAL)]
    else:
        padded = [np.zeros((len(chunks), width), dtype=np.int32) for _ in (GLOBAL, LOCAL)]
        for index, chunk in enumerate(chunks):
            for group, table in ((GLOBAL, chunk.global_block_table), (LOCAL, chunk.local_block_table)):
                padded[group][index, : len(table)] = table[:width]
    return [to_device(table, device) for table in padded], [table[sequences, block_indices] for table in padded]


def _tables_of_decodes(chunks: DecodeChunks, width: int, device: torch.device) -> torch.Tensor:
    """int32 [group, num_seqs, width or more] on the device: kept there, and told what has changed since the step before, so that
    a step costs the same whatever the contexts."""
    source, kept = chunks.tables, chunks.scratch.get("tables")
    if kept is None or kept.step + 1 != source.step or kept.tensor.shape[2] < width:
        kept = chunks.scratch["tables"] = _KeptTables(chunks, min(width + SPARE_WIDTH, source.blocks.shape[2]), device)
    elif source.changed_rows:
        rows, indices = np.array(source.changed_rows), np.array(source.changed_indices)
        sequences = kept.sequence_of[rows]
        if sequences.min() < 0:  # a sequence that has ended or begun since
            rows, indices, sequences = rows[sequences >= 0], indices[sequences >= 0], sequences[sequences >= 0]
        _, num_seqs, wide = kept.tensor.shape
        places = sequences * wide + indices
        where = np.concatenate((places, places + num_seqs * wide))
        kept.entries.index_copy_(0, to_device(where, device), to_device(source.blocks[:, rows, indices].reshape(-1), device))
    kept.step = source.step
    return kept.tensor


class _KeptTables:
    def __init__(self, chunks: DecodeChunks, width: int, device: torch.device) -> None:
        blocks = chunks.tables.blocks
        self.tensor = to_device(np.stack([blocks[group, chunks.rows, :width] for group in (GLOBAL, LOCAL)]), device)
        self.entries = self.tensor.view(-1)
        self.sequence_of = np.full(blocks.shape[1], -1)  # row of BlockTableRows -> sequence of the batch
        self.sequence_of[chunks.rows] = np.arange(len(chunks))
        self.step = 0


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor of an array that nobody writes to any more: its own memory on a CPU, else a copy that is not waited for."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":  # from other than pinned memory, the host would wait until the device has done all its work
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
