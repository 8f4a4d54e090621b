"""Kernels that follow the radix search of ``selection.py``: list the candidates found, or draw among the
tokens kept."""

import triton
import triton.language as tl

from model.ops.cuda.triton.selection import (
    LAST_PASS,
    _row_maximum,
    logit_of,
    mass,
    ordered,
    search_state,
    weight,
)


@triton.jit(do_not_specialize=["num_rows"])
def count_candidates_kernel(
    logits,
    maxima,
    temperature,
    states,
    bins,
    counts,  # int32 [r, NUM_BLOCKS, 2]: tokens above the border value, tokens at it
    sums,  # float32 [r, NUM_BLOCKS]: exponentials of all tokens
    num_rows,
    size,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    border, _, _ = search_state(
        states, bins, row, num_rows, LAST_PASS, temperature, False, NUM_BLOCKS, BLOCKS
    )
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * size + ids, mask=ids < size, other=float("-inf"))
    key = tl.where(ids < size, ordered(x), -1)
    place = row * NUM_BLOCKS + block
    tl.store(counts + place * 2, tl.sum((key > border).to(tl.int32), axis=0))
    tl.store(counts + place * 2 + 1, tl.sum((key == border).to(tl.int32), axis=0))
    weights = weight(x, _row_maximum(maxima, row, NUM_BLOCKS, BLOCKS), tl.load(temperature + row))
    tl.store(sums + place, tl.sum(weights, axis=0))


@triton.jit(do_not_specialize=["num_rows", "k"])
def list_candidates_kernel(
    logits,
    states,
    bins,
    counts,
    sums,
    values,  # float32 [r, k]
    token_ids,  # int64 [r, k]
    log_total,  # float32 [r]
    num_rows,
    size,
    k,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the kept tokens of one block to their places in order of id."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    border, above, target = search_state(
        states, bins, row, num_rows, LAST_PASS, sums, False, NUM_BLOCKS, BLOCKS
    )
    num_ties = (target - above).to(tl.int32)  # tokens at the border that are kept: those with the lowest ids
    blocks = tl.arange(0, BLOCKS)
    earlier = blocks < block
    places = counts + (row * NUM_BLOCKS + blocks) * 2
    above_before = tl.sum(tl.load(places, mask=earlier, other=0), axis=0)
    ties_before = tl.sum(tl.load(places + 1, mask=earlier, other=0), axis=0)
    if block == 0:
        each = tl.load(sums + row * NUM_BLOCKS + blocks, mask=blocks < NUM_BLOCKS, other=0.0)
        tl.store(log_total + row, tl.log(tl.sum(each, axis=0)))
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * size + ids, mask=ids < size, other=float("-inf"))
    key = tl.where(ids < size, ordered(x), -1)
    is_tie = (key == border).to(tl.int32)
    is_kept_tie = (is_tie > 0) & (ties_before + tl.cumsum(is_tie, axis=0) <= num_ties)
    is_kept = (key > border) | is_kept_tie
    position = above_before + tl.minimum(ties_before, num_ties) + tl.cumsum(is_kept.to(tl.int32), axis=0) - 1
    is_kept = is_kept & (position < k)
    tl.store(values + row * k + position, x, mask=is_kept)
    tl.store(token_ids + row * k + position, ids.to(tl.int64), mask=is_kept)


@triton.jit
def _border(
    states, bins, row, num_rows, largest, temperature, top_p, min_p,
    MASS_SCALE: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Find where top_p cuts -> (border, mass of a token at it, number of tokens at it that are kept); all
    tokens above the border are kept."""
    border, num_kept, each = row * 0 - 1, row * 0, row * 0
    if tl.load(top_p + row) < 1.0:
        border, above, target = search_state(
            states, bins, row, num_rows, LAST_PASS, top_p, True, NUM_BLOCKS, BLOCKS
        )
        relative = weight(logit_of(border), largest, temperature)
        each = mass(relative, MASS_SCALE)
        num_kept = tl.where(relative < min_p, 0, tl.cdiv(target - above, tl.maximum(each, 1)))
    return border, each, num_kept


@triton.jit(do_not_specialize=["num_rows"])
def measure_kernel(
    logits,
    maxima,
    temperature,
    top_p,
    min_p,
    states,
    bins,
    masses,  # int64 [r, NUM_BLOCKS, 2]: mass of the kept tokens above the border, number of tokens at it
    num_rows,
    size,
    MASS_SCALE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    largest, warmth, least = (
        _row_maximum(maxima, row, NUM_BLOCKS, BLOCKS),
        tl.load(temperature + row),
        tl.load(min_p + row),
    )
    border, _, _ = _border(
        states, bins, row, num_rows, largest, warmth, top_p, least, MASS_SCALE, NUM_BLOCKS, BLOCKS
    )
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * size + ids, mask=ids < size, other=float("-inf"))
    key = tl.where(ids < size, ordered(x), -2)
    weights = weight(x, largest, warmth)
    kept = tl.where((key > border) & (weights >= least), mass(weights, MASS_SCALE), 0)
    place = masses + (row * NUM_BLOCKS + block) * 2
    tl.store(place, tl.sum(kept, axis=0))
    tl.store(place + 1, tl.sum((key == border).to(tl.int64), axis=0))


@triton.jit(do_not_specialize=["num_rows"])
def draw_kernel(
    logits,
    maxima,
    temperature,
    top_p,
    min_p,
    uniform,
    states,
    bins,
    masses,
    drawn,  # int64 [r]
    num_rows,
    size,
    MASS_SCALE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draw the first token, in order of id, at which the running mass of the kept tokens exceeds uniform
    times their total mass."""
    row = tl.program_id(0).to(tl.int64)
    largest, warmth, least = (
        _row_maximum(maxima, row, NUM_BLOCKS, BLOCKS),
        tl.load(temperature + row),
        tl.load(min_p + row),
    )
    border, each, num_kept = _border(
        states, bins, row, num_rows, largest, warmth, top_p, least, MASS_SCALE, NUM_BLOCKS, BLOCKS
    )
    blocks = tl.arange(0, BLOCKS)
    places = masses + (row * NUM_BLOCKS + blocks) * 2
    above = tl.load(places, mask=blocks < NUM_BLOCKS, other=0)
    ties = tl.load(places + 1, mask=blocks < NUM_BLOCKS, other=0)
    ties_through = tl.cumsum(ties, axis=0)
    kept_ties = tl.minimum(ties_through, num_kept) - tl.minimum(ties_through - ties, num_kept)
    of_block = above + kept_ties * each
    through = tl.cumsum(of_block, axis=0)
    total = tl.sum(of_block, axis=0)
    goal = (tl.load(uniform + row) * total.to(tl.float64)).to(tl.int64)
    goal = tl.maximum(tl.minimum(goal, total - 1), 0)
    block = tl.minimum(tl.sum((through <= goal).to(tl.int32), axis=0), NUM_BLOCKS - 1)
    goal -= tl.sum(tl.where(blocks < block, of_block, 0), axis=0)
    ties_before = tl.sum(tl.where(blocks < block, ties, 0), axis=0)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * size + ids, mask=ids < size, other=float("-inf"))
    key = tl.where(ids < size, ordered(x), -2)
    weights = weight(x, largest, warmth)
    is_tie = (key == border).to(tl.int64)
    is_kept_tie = (is_tie > 0) & (ties_before + tl.cumsum(is_tie, axis=0) <= num_kept)
    is_kept = is_kept_tie | ((key > border) & (weights >= least))
    within = tl.cumsum(tl.where(is_kept, mass(weights, MASS_SCALE), 0), axis=0)
    place = block * BLOCK + tl.sum((within <= goal).to(tl.int32), axis=0)
    tl.store(drawn + row, tl.minimum(place, size - 1).to(tl.int64))
