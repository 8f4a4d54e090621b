"""SequenceChunks (plain Python) to one ForwardBatch (tensors): the flat batch that the network runs.

The chunks lie one after the other; nothing is padded but the block tables. Everything is laid out on the host
and moved once, by operations on whole arrays: a batch of hundreds of decodes has no loop over them but those
that read their fields.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from model.interface.block_tables import GLOBAL, LOCAL
from model.interface.kv_cache_spec import KVCacheSpec
from model.interface.sequence_chunk import DecodeChunks, DrawnTokens, SequenceChunk
from model.network.pending_step import PendingStep
from model.ops.interface import AttentionMetadata

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
    if isinstance(chunks, DecodeChunks):
        return _batch_of_decodes(chunks, spec, device)
    num_seqs, block_size = len(chunks), spec.block_size
    query_lens = tuple(len(chunk.token_ids) for chunk in chunks)
    assert all(query_lens), "a chunk without tokens"
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    lengths = np.array(query_lens, dtype=np.int64)
    first_rows = (0, *accumulate(query_lens))
    ends = starts + lengths
    sequences = np.repeat(np.arange(num_seqs), lengths)
    positions = np.arange(len(sequences)) + (starts - first_rows[:-1])[sequences]
    block_indices = positions // block_size
    tables = _block_tables(chunks, -(-int(ends.max()) // block_size))
    blocks = [table[sequences, block_indices] for table in tables]
    return _batch(
        token_ids=to_device(
            np.concatenate([np.asarray(chunk.token_ids, dtype=np.int64) for chunk in chunks]), device
        ),
        positions=positions,
        ends=ends,
        query_lens=query_lens,
        first_rows=first_rows,
        query_start=to_device(np.array(first_rows, dtype=np.int32), device),
        block_tables=[to_device(table, device) for table in tables],
        slots=np.array(blocks, dtype=np.int64) * block_size + positions % block_size,
        spec=spec,
        device=device,
    )


def _batch(
    *,
    token_ids: torch.Tensor,
    positions: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    query_lens: tuple[int, ...],
    first_rows: tuple[int, ...],
    query_start: torch.Tensor,
    block_tables: torch.Tensor | Sequence[torch.Tensor],
    slots: npt.NDArray[np.int64],
    spec: KVCacheSpec,
    device: torch.device,
) -> ForwardBatch:
    """``ends`` are the sequences' lengths after the step; ``slots`` [group, n]."""
    assert int(slots.min()) >= spec.block_size, "a token is to be written to the null block"
    context_lens = tuple(ends.tolist())
    context_lens_tensor = to_device(ends.astype(np.int32), device)

    def attention(group: int, window: int | None) -> AttentionMetadata:
        return AttentionMetadata(
            window=window,
            block_size=spec.block_size,
            query_lens=query_lens,
            context_lens=context_lens,
            query_start=query_start,
            context_lens_tensor=context_lens_tensor,
            block_table=block_tables[group],
            slot_mapping=to_device(slots[group], device),
        )

    return ForwardBatch(
        token_ids=token_ids,
        positions=to_device(positions, device),
        global_attention=attention(GLOBAL, None),
        local_attention=attention(LOCAL, spec.sliding_window),
        first_rows=first_rows,
    )


def _block_tables(chunks: Sequence[SequenceChunk], width: int) -> list[npt.NDArray[np.int32]]:
    """For each group [num_seqs, width], zero where a sequence has no block, or has it no more."""
    tables = chunks[0].tables
    if tables is not None:
        rows = np.array([chunk.row for chunk in chunks])
        return [tables.blocks[group, rows, :width] for group in (GLOBAL, LOCAL)]
    padded = [np.zeros((len(chunks), width), dtype=np.int32) for _ in (GLOBAL, LOCAL)]
    for index, chunk in enumerate(chunks):
        for group, table in ((GLOBAL, chunk.global_block_table), (LOCAL, chunk.local_block_table)):
            padded[group][index, : len(table)] = table[:width]
    return padded


# -- decodes -------------------------------------------------------------------------------------------------


class _DecodePlan:
    """What holds for every step of the same sequences, while the array of all tables does not grow."""

    def __init__(self, chunks: DecodeChunks, device: torch.device) -> None:
        num_seqs, source = len(chunks), chunks.tables.blocks
        _, num_rows, width = source.shape
        self.source = source
        self.entries = source.reshape(-1)
        self.first_entries = chunks.rows * width + np.array([[GLOBAL], [LOCAL]]) * (
            num_rows * width
        )  # [group, num_seqs]
        self.query_lens = (1,) * num_seqs
        self.first_rows = tuple(range(num_seqs + 1))
        self.query_start = to_device(np.array(self.first_rows, dtype=np.int32), device)


def _batch_of_decodes(chunks: DecodeChunks, spec: KVCacheSpec, device: torch.device) -> ForwardBatch:
    """By operations on whole arrays, and as few as can be: each of them costs a step more than the length of
    its arrays does."""
    plan: _DecodePlan | None = chunks.scratch.get("plan")
    if plan is None or plan.source is not chunks.tables.blocks:
        plan = chunks.scratch["plan"] = _DecodePlan(chunks, device)
    positions = chunks.starts
    block_indices, offsets = np.divmod(positions, spec.block_size)
    slots = plan.entries.take(plan.first_entries + block_indices).astype(
        np.int64
    )  # [group, n], of block ids yet
    slots *= spec.block_size
    slots += offsets
    return _batch(
        token_ids=to_device(chunks.token_ids, device)
        if chunks.drawn is None
        else drawn_token_ids(chunks.drawn, device),
        positions=positions,
        ends=positions + 1,
        query_lens=plan.query_lens,
        first_rows=plan.first_rows,
        query_start=plan.query_start,
        block_tables=_tables_of_decodes(chunks, int(block_indices.max()) + 1, device),
        slots=slots,
        spec=spec,
        device=device,
    )


def drawn_token_ids(drawn: DrawnTokens, device: torch.device) -> torch.Tensor:
    """int64 [n], which the device has drawn, or is going to before it gets here."""
    assert isinstance(drawn.step, PendingStep), "a step of another runner"
    return drawn.step.token_ids(None if drawn.chunks is None else to_device(drawn.chunks, device))


def _tables_of_decodes(
    chunks: DecodeChunks, width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [num_seqs, width or more] of each group on the device: kept there, and told what has changed
    since the step before, so that a step costs the same whatever the contexts."""
    source, kept = chunks.tables, chunks.scratch.get("tables")
    if kept is None or kept.step + 1 != source.step or kept.width < width:
        kept = chunks.scratch["tables"] = _KeptTables(
            chunks, min(width + SPARE_WIDTH, source.blocks.shape[2]), device
        )
    elif source.changed_rows:
        rows, indices = np.array((source.changed_rows, source.changed_indices))
        first = kept.first_places[rows]
        if first.min() < 0:  # a sequence that has ended or begun since
            is_here = first >= 0
            rows, indices, first = rows[is_here], indices[is_here], first[is_here]
        kept.set(first + indices, source.blocks[:, rows, indices])
    kept.step = source.step
    return kept.groups


class _KeptTables:
    def __init__(self, chunks: DecodeChunks, width: int, device: torch.device) -> None:
        blocks = chunks.tables.blocks
        tables = np.stack([blocks[group, chunks.rows, :width] for group in (GLOBAL, LOCAL)])
        tensor = to_device(tables, device)
        self.step = 0
        self.width = width
        self.groups = (tensor[GLOBAL], tensor[LOCAL])
        self.first_places = np.full(
            blocks.shape[1], -1
        )  # row of BlockTableRows -> first of the sequence's entries in a group
        self.first_places[chunks.rows] = np.arange(len(chunks)) * width
        self._device = device
        self._entries = tensor.view(-1)
        self._shared = tables.reshape(-1) if device.type == "cpu" else None  # the tensor's own memory
        self._groups = np.array([[0], [len(chunks) * width]])

    def set(self, places: npt.NDArray[np.int64], blocks: npt.NDArray[np.int32]) -> None:
        """``places`` [k] are those within each group, ``blocks`` [group, k]."""
        places = places + self._groups
        if self._shared is not None:
            self._shared[places] = blocks
        else:
            self._entries.index_copy_(
                0, to_device(places.reshape(-1), self._device), to_device(blocks.reshape(-1), self._device)
            )


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor of an array that nobody writes to any more: its own memory on a CPU, else a copy that is not
    waited for."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if (
        device.type == "cuda"
    ):  # from other than pinned memory, the host would wait until the device has done all its work
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
