"""One step as arrays of the host, and then as the flat batch of tensors that the network runs.

Sequences lie one after the other; nothing is padded but the block tables. Everything is laid out on the host
and moved once, by operations on whole arrays: a batch of hundreds of decodes has no loop over them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from model.interface.kv_cache_spec import KVCacheSpec
from model.interface.running_batch import GLOBAL, LOCAL, IntArray
from model.interface.sequence_chunk import StepInput
from model.ops.interface import AttentionMetadata


@dataclass(frozen=True, slots=True)
class StepLayout:
    """One step of S sequences and n tokens on the host. It can be sent to another process."""

    rows: IntArray  # [S]: row of each sequence in the running batch
    query_lens: tuple[int, ...]  # [S]: tokens of each sequence in this step
    first_tokens: IntArray  # [S + 1]: index of each sequence's first token, and n at the end
    context_lens: IntArray  # [S]: tokens of each sequence in the cache once this step has written its own
    token_ids: IntArray | None  # [n]; None: the device has drawn them
    positions: IntArray  # [n]: index of each token in its sequence
    slots: IntArray  # [group, n]: block id * B + position % B, where keys and values are written
    table_width: int  # entries of a block table that the step reads
    block_tables: npt.NDArray[np.int32] | None  # [group, S, table_width]; None: the device has its own

    @property
    def last_tokens(self) -> IntArray:
        """Index of each sequence's last token, [S]."""
        return self.first_tokens[1:] - 1


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's tokens and how they map onto both groups of the cache."""

    token_ids: torch.Tensor  # int64 [n]
    positions: torch.Tensor  # int64 [n]
    global_attention: AttentionMetadata
    local_attention: AttentionMetadata


def lay_out(step: StepInput, spec: KVCacheSpec, *, with_tables: bool) -> StepLayout:
    """Lay a step out flat. Every sequence has at least one token, and blocks for all of them."""
    batch, block_size, count = step.batch, spec.block_size, len(step.decodes)
    rows, positions, token_ids = step.rows, step.starts, step.token_ids
    query_lens: tuple[int, ...] = (1,) * count
    first_tokens = np.arange(count + 1)
    sequences = rows  # row of each token
    if step.prefills:
        assert token_ids is not None or not count, "tokens that are not known yet go with decodes alone"
        lengths = [len(chunk.token_ids) for chunk in step.prefills]
        assert all(lengths), "a chunk without tokens"
        query_lens = (*query_lens, *lengths)
        first_tokens = np.cumsum((0, *query_lens))
        chunks = [np.arange(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in step.prefills]
        positions = np.concatenate((positions, *chunks))
        known = [np.asarray(chunk.token_ids, dtype=np.int64) for chunk in step.prefills]
        token_ids = np.concatenate(known if token_ids is None else (token_ids, *known))
        sequences = np.repeat(rows, query_lens)
        context_lens = positions[first_tokens[1:] - 1] + 1
    else:
        context_lens = positions + 1
    block_indices, offsets = np.divmod(positions, block_size)
    slots = batch.blocks[:, sequences, block_indices].astype(np.int64, order="C")  # still block ids
    slots *= block_size
    slots += offsets
    assert int(slots.min()) >= block_size, "a token is to be written to the null block"
    width = int(block_indices.max()) + 1
    return StepLayout(
        rows=rows,
        query_lens=query_lens,
        first_tokens=first_tokens,
        context_lens=context_lens,
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        table_width=width,
        block_tables=batch.block_tables(rows, width) if with_tables else None,
    )


def forward_batch(
    layout: StepLayout,
    token_ids: torch.Tensor,
    block_tables: torch.Tensor,
    spec: KVCacheSpec,
    device: torch.device,
) -> ForwardBatch:
    """Make the tensors of a step's flat batch. ``token_ids`` int64 [n] and ``block_tables`` int32 [group, S,
    table_width or more] are on the device."""
    context_lens = tuple(layout.context_lens.tolist())
    context_lens_tensor = to_device(layout.context_lens.astype(np.int32), device)
    query_start = to_device(layout.first_tokens.astype(np.int32), device)
    slots = to_device(layout.slots, device)

    def attention(group: int, window: int | None) -> AttentionMetadata:
        return AttentionMetadata(
            window=window,
            block_size=spec.block_size,
            query_lens=layout.query_lens,
            context_lens=context_lens,
            query_start=query_start,
            context_lens_tensor=context_lens_tensor,
            block_table=block_tables[group],
            slot_mapping=slots[group],
        )

    return ForwardBatch(
        token_ids=token_ids,
        positions=to_device(layout.positions, device),
        global_attention=attention(GLOBAL, None),
        local_attention=attention(LOCAL, spec.sliding_window),
    )


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Move an array that nobody writes to any more to the device: without a copy on a CPU, else by a copy
    that is not waited for."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    # from other than pinned memory, the host would wait until the device has done all its work
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
