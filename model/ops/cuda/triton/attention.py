"""Paged attention: one loop over a tile's keys, entered by decodes with their context split and by prefill
chunks.

A tile is some consecutive queries of one sequence times the query heads of one KV head, so that keys and
values are read once for the whole group and products run on tensor cores. Keys are taken TILE_KEYS positions
at a time through the block table, from the first position that a query of the tile sees to the last; nothing
else is read, and what a load skips counts as zero. Scores, softmax and sums are float32 (online softmax:
Milakov and Gimelshein 2018; splits and their reduction: flash-decoding).
"""

import triton
import triton.language as tl

from model.ops.cuda.triton.common import product, rounded, weighted_sum

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    query,  # [M, D] as it lies in memory
    query_positions,  # int32 [M]
    first_key,  # first position that a query of the tile sees
    first_tile,
    last_tile,
    context,
    k_cache,
    v_cache,
    table_row,
    scale,
    k_block_stride,
    k_slot_stride,
    v_block_stride,
    v_slot_stride,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Attend over the keys of tiles first_tile : last_tile -> (sums of weighted values [M, D], largest score
    [M], sum of weights [M]), all float32."""
    dims = tl.arange(0, DIM_BLOCK)
    sums = tl.zeros([TILE_ROWS, DIM_BLOCK], dtype=tl.float32)
    largest = tl.full([TILE_ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([TILE_ROWS], dtype=tl.float32)
    for tile in range(first_tile, last_tile):
        positions = tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
        live = (positions >= first_key) & (positions < context)
        blocks = tl.load(table_row + positions // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        slots = positions % BLOCK_SIZE
        wanted = live[:, None] & (dims < HEAD_DIM)[None, :]
        k_rows = k_cache + blocks * k_block_stride + slots * k_slot_stride
        keys = tl.load(k_rows[:, None] + dims[None, :], mask=wanted, other=0.0)
        scores = product(query, tl.trans(keys), tl.zeros([TILE_ROWS, TILE_KEYS], dtype=tl.float32)) * scale
        distance = query_positions[:, None] - positions[None, :]
        seen = (distance >= 0) & live[None, :]
        if WINDOW > 0:
            seen = seen & (distance < WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        # a row that has seen nothing yet stays at zero
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2((scores - base[:, None]) * LOG2_E)
        shrink = tl.exp2((largest - base) * LOG2_E)
        total = total * shrink + tl.sum(weights, axis=1)
        v_rows = v_cache + blocks * v_block_stride + slots * v_slot_stride
        values = tl.load(v_rows[:, None] + dims[None, :], mask=wanted, other=0.0)
        sums = weighted_sum(weights, values, sums * shrink[:, None])
        largest = new_largest
    return sums, largest, total


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["query_start", "context_lens", "block_table"],
)
def decode_kernel(
    query,
    k_cache,
    v_cache,
    query_start,
    context_lens,
    block_table,
    output,
    partial_sums,
    partial_stats,
    scale,
    table_stride,
    k_block_stride,
    k_slot_stride,
    v_block_stride,
    v_slot_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Attend with the one query of one sequence, for one KV head, over one split of the context."""
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(query_start + sequence)
    if tl.load(query_start + sequence + 1) - token != 1:
        return
    context = tl.load(context_lens + sequence)
    first_key, first_tile, num_tiles, tiles_each = _splits(context, WINDOW, NUM_SPLITS, MIN_TILES, TILE_KEYS)
    begin = first_tile + split * tiles_each
    end = tl.minimum(begin + tiles_each, first_tile + num_tiles)
    if NUM_SPLITS > 1:
        if begin >= end:
            return
    rows = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, DIM_BLOCK)
    heads = kv_head * GROUP + rows
    wanted = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    places = token.to(tl.int64) * (NUM_HEADS * HEAD_DIM) + (heads * HEAD_DIM)[:, None] + dims[None, :]
    sums, largest, total = _attend(
        tl.load(query + places, mask=wanted, other=0.0),
        context - 1 + rows * 0,
        first_key,
        begin,
        end,
        context,
        k_cache + kv_head * HEAD_DIM,
        v_cache + kv_head * HEAD_DIM,
        block_table + sequence.to(tl.int64) * table_stride,
        scale,
        k_block_stride,
        k_slot_stride,
        v_block_stride,
        v_slot_stride,
        WINDOW,
        HEAD_DIM,
        BLOCK_SIZE,
        TILE_ROWS,
        TILE_KEYS,
        DIM_BLOCK,
    )
    if NUM_SPLITS == 1:
        result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(output + places, rounded(result, output.dtype.element_ty), mask=wanted)
    else:
        parts = (sequence.to(tl.int64) * NUM_HEADS + heads) * NUM_SPLITS + split
        tl.store(partial_sums + (parts * HEAD_DIM)[:, None] + dims[None, :], sums, mask=wanted)
        tl.store(partial_stats + parts * 2, largest, mask=rows < GROUP)
        tl.store(partial_stats + parts * 2 + 1, total, mask=rows < GROUP)


@triton.jit
def _splits(
    context, WINDOW: tl.constexpr, NUM_SPLITS: tl.constexpr, MIN_TILES: tl.constexpr, TILE_KEYS: tl.constexpr
):
    """Divide the context of a decode -> (first visible key, its tile, number of tiles, tiles of each split).
    Used by the programs that write the splits and by the one that reads them."""
    first_key = context * 0
    if WINDOW > 0:
        first_key = tl.maximum(context - WINDOW, 0)
    first_tile = first_key // TILE_KEYS
    num_tiles = tl.cdiv(context, TILE_KEYS) - first_tile
    return first_key, first_tile, num_tiles, tl.maximum(tl.cdiv(num_tiles, NUM_SPLITS), MIN_TILES)


@triton.jit(do_not_specialize_on_alignment=["query_start", "context_lens"])
def reduce_kernel(
    partial_sums,
    partial_stats,
    query_start,
    context_lens,
    output,
    NUM_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    SPLITS_STEP: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Merge the splits of one sequence and query head."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start + sequence)
    if tl.load(query_start + sequence + 1) - token != 1:
        return
    context = tl.load(context_lens + sequence)
    _, _, num_tiles, tiles_each = _splits(context, WINDOW, NUM_SPLITS, MIN_TILES, TILE_KEYS)
    num_splits = tl.cdiv(num_tiles, tiles_each)
    first = (sequence.to(tl.int64) * NUM_HEADS + head) * NUM_SPLITS
    every = tl.arange(0, SPLITS_BLOCK)
    largest = tl.load(partial_stats + (first + every) * 2, mask=every < num_splits, other=float("-inf"))
    overall = tl.max(largest, axis=0)
    base = tl.where(overall == float("-inf"), 0.0, overall)
    dims = tl.arange(0, DIM_BLOCK)
    sums = tl.zeros([DIM_BLOCK], dtype=tl.float32)
    total = base * 0.0
    for start in range(0, num_splits, SPLITS_STEP):
        splits = start + tl.arange(0, SPLITS_STEP)
        present = splits < num_splits
        stats = partial_stats + (first + splits) * 2
        weights = tl.exp2((tl.load(stats, mask=present, other=float("-inf")) - base) * LOG2_E)
        total += tl.sum(weights * tl.load(stats + 1, mask=present, other=0.0), axis=0)
        places = ((first + splits) * HEAD_DIM)[:, None] + dims[None, :]
        parts = tl.load(partial_sums + places, mask=present[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        sums += tl.sum(weights[:, None] * parts, axis=0)
    result = sums / tl.where(total == 0.0, 1.0, total)
    place = output + (token.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(place, rounded(result, output.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit(
    do_not_specialize=["num_seqs", "table_stride"],
    do_not_specialize_on_alignment=["query_start", "context_lens", "block_table"],
)
def prefill_kernel(
    query,
    k_cache,
    v_cache,
    query_start,
    context_lens,
    block_table,
    output,
    num_seqs,
    scale,
    table_stride,
    k_block_stride,
    k_slot_stride,
    v_block_stride,
    v_slot_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Attend with TILE_QUERIES queries of one sequence for one KV head. Row r of the tile is query r //
    GROUP, head r % GROUP.

    Sequence i has the tiles from query_start[i] // TILE_QUERIES + i on: these starts ascend, and leave enough
    for each. So the number of programs follows from the numbers of tokens and sequences alone, and no plan is
    made on the host.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    low, high = num_seqs * 0, num_seqs - 1
    while low < high:  # the last sequence whose tiles start at this one or before
        middle = (low + high + 1) // 2
        if tl.load(query_start + middle) // TILE_QUERIES + middle <= tile:
            low = middle
        else:
            high = middle - 1
    sequence = low
    start = tl.load(query_start + sequence)
    num_queries = tl.load(query_start + sequence + 1) - start
    first_query = (tile - (start // TILE_QUERIES + sequence)) * TILE_QUERIES
    if num_queries <= 1 or first_query >= num_queries:
        return
    context = tl.load(context_lens + sequence)
    position = context - num_queries + first_query  # position of the tile's first query
    end = tl.minimum(position + TILE_QUERIES, context)  # past the last key that its last query sees
    first_key = position * 0
    if WINDOW > 0:
        first_key = tl.maximum(position - WINDOW + 1, 0)
    rows = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, DIM_BLOCK)
    queries = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    real = (rows < TILE_QUERIES * GROUP) & (queries < num_queries)
    wanted = real[:, None] & (dims < HEAD_DIM)[None, :]
    places = ((start + queries).to(tl.int64) * (NUM_HEADS * HEAD_DIM) + heads * HEAD_DIM)[:, None] + dims[
        None, :
    ]
    sums, _, total = _attend(
        tl.load(query + places, mask=wanted, other=0.0),
        position + rows // GROUP,
        first_key,
        first_key // TILE_KEYS,
        tl.cdiv(end, TILE_KEYS),
        end,
        k_cache + kv_head * HEAD_DIM,
        v_cache + kv_head * HEAD_DIM,
        block_table + sequence.to(tl.int64) * table_stride,
        scale,
        k_block_stride,
        k_slot_stride,
        v_block_stride,
        v_slot_stride,
        WINDOW,
        HEAD_DIM,
        BLOCK_SIZE,
        TILE_ROWS,
        TILE_KEYS,
        DIM_BLOCK,
    )
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(output + places, rounded(result, output.dtype.element_ty), mask=wanted)
