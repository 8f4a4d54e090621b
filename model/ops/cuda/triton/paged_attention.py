"""Launches of the attention kernels: tile sizes by head size and type, splits by how much of the device the
batch leaves idle."""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from model.ops.cuda.triton.attention import decode_kernel, prefill_kernel, reduce_kernel
from model.ops.cuda.triton.common import INTERPRETED
from model.ops.interface import AttentionMetadata

MIN_SPLIT_KEYS = 128  # a split of fewer keys costs more to put together than it saves
MAX_SPLITS = 128
PROGRAMS_PER_PROCESSOR = 2
SPLITS_STEP = 16  # parts that the reduction holds at once


@dataclass(frozen=True, slots=True)
class Device:
    """The traits of a GPU that the sizes of launches depend on."""

    num_processors: int
    # or Blackwell's data centre cards: 227 KiB of shared memory, matrix instructions of four warps and 64
    # rows
    is_hopper: bool

    @classmethod
    def of(cls, properties: Any) -> "Device":
        """Read the traits from torch's description. Blackwell's consumer cards, 12.x, are newer but have the
        99 KiB of Ampere's."""
        return cls(properties.multi_processor_count, 9 <= properties.major < 12)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of the tiles; those for Ampere fit the 99 KiB of shared memory of its consumer cards."""

    keys: int
    prefill_rows: int
    prefill_warps: int
    # three: while a tile is worked on, the next one's memory is read, and the block ids of the one after
    num_stages: int


def choose_tiles(head_dim: int, dtype: torch.dtype, device: Device) -> Tiles:
    # float32 products run on plain arithmetic units, which keep their operands in registers. The interpreter
    # takes as long for a small tile as for a large one.
    if dtype == torch.float32 and not INTERPRETED:
        return Tiles(keys=16, prefill_rows=16, prefill_warps=4, num_stages=1)
    if device.is_hopper:
        return Tiles(keys=32 if head_dim > 128 else 64, prefill_rows=128, prefill_warps=8, num_stages=3)
    if head_dim > 128:
        return Tiles(keys=32, prefill_rows=64, prefill_warps=8, num_stages=3)
    return Tiles(keys=64, prefill_rows=64, prefill_warps=4, num_stages=3)


def choose_num_splits(num_seqs: int, num_kv_heads: int, window: int | None, num_processors: int) -> int:
    """Choose the number of parts that each context is split into: a power of two, so that few variants are
    ever compiled."""
    wanted = PROGRAMS_PER_PROCESSOR * num_processors // (num_seqs * num_kv_heads)
    most = MAX_SPLITS if window is None else min(MAX_SPLITS, window // MIN_SPLIT_KEYS)
    return 1 << (max(1, min(wanted, most)).bit_length() - 1)


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    device: Device,
) -> torch.Tensor:
    """Launch attention as ``Ops.paged_attention`` specifies it -> [n, Hq * D]. Uses the metadata's host
    copies only to see which kinds of sequences there are."""
    num_tokens, num_heads, head_dim = query.shape
    num_seqs = len(metadata.query_lens)
    output = torch.empty_like(query)
    if num_tokens == 0:
        return output.view(0, num_heads * head_dim)
    if any(count == 1 for count in metadata.query_lens):
        _decode(query, k_cache, v_cache, metadata, scale, num_seqs, device, output)
    if any(count > 1 for count in metadata.query_lens):
        _prefill(query, k_cache, v_cache, metadata, scale, num_seqs, device, output)
    return output.view(num_tokens, num_heads * head_dim)


def _decode(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    num_seqs: int,
    device: Device,
    output: torch.Tensor,
) -> None:
    _, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    tiles = choose_tiles(head_dim, query.dtype, device)
    num_splits = choose_num_splits(num_seqs, num_kv_heads, metadata.window, device.num_processors)
    dim_block = max(16, triton.next_power_of_2(head_dim))
    min_tiles = max(1, MIN_SPLIT_KEYS // tiles.keys)
    partial_sums = partial_stats = output  # neither read nor written where nothing is split
    if num_splits > 1:
        partial_sums = query.new_empty((num_seqs, num_heads, num_splits, head_dim), dtype=torch.float32)
        partial_stats = query.new_empty((num_seqs, num_heads, num_splits, 2), dtype=torch.float32)
    decode_kernel[(num_seqs, num_kv_heads, num_splits)](
        query,
        k_cache,
        v_cache,
        metadata.query_start,
        metadata.context_lens_tensor,
        metadata.block_table,
        output,
        partial_sums,
        partial_stats,
        scale,
        metadata.block_table.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        NUM_HEADS=num_heads,
        GROUP=group,
        WINDOW=metadata.window or 0,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        NUM_SPLITS=num_splits,
        MIN_TILES=min_tiles,
        TILE_ROWS=max(16, triton.next_power_of_2(group)),
        TILE_KEYS=tiles.keys,
        DIM_BLOCK=dim_block,
        num_warps=4,
        num_stages=tiles.num_stages,
    )
    if num_splits > 1:
        reduce_kernel[(num_seqs, num_heads)](
            partial_sums,
            partial_stats,
            metadata.query_start,
            metadata.context_lens_tensor,
            output,
            NUM_HEADS=num_heads,
            WINDOW=metadata.window or 0,
            HEAD_DIM=head_dim,
            NUM_SPLITS=num_splits,
            MIN_TILES=min_tiles,
            TILE_KEYS=tiles.keys,
            SPLITS_BLOCK=num_splits,
            SPLITS_STEP=min(SPLITS_STEP, num_splits),
            DIM_BLOCK=dim_block,
            num_warps=4,
        )


def _prefill(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    num_seqs: int,
    device: Device,
    output: torch.Tensor,
) -> None:
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    tiles = choose_tiles(head_dim, query.dtype, device)
    rows = max(tiles.prefill_rows, triton.next_power_of_2(group))
    tile_queries = rows // group
    prefill_kernel[(num_tokens // tile_queries + num_seqs, num_kv_heads)](
        query,
        k_cache,
        v_cache,
        metadata.query_start,
        metadata.context_lens_tensor,
        metadata.block_table,
        output,
        num_seqs,
        scale,
        metadata.block_table.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        NUM_HEADS=num_heads,
        GROUP=group,
        WINDOW=metadata.window or 0,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TILE_QUERIES=tile_queries,
        TILE_ROWS=rows,
        TILE_KEYS=tiles.keys,
        DIM_BLOCK=max(16, triton.next_power_of_2(head_dim)),
        num_warps=tiles.prefill_warps,
        num_stages=tiles.num_stages,
    )
