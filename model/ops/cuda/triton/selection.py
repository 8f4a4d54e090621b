"""Kernels that choose tokens from rows of logits without sorting them, in passes over blocks of the row.

Every pass writes what it found per block to a place of its own, and the next one puts the blocks together, in
every program again, in the order of the blocks. So results do not depend on which program came first, nor on
the other rows. Masses are integers (``mass``), whose sums are exact in any order.

The likeliest tokens up to a number or to a share of the mass are found by radix search: logits become
integers that order as they do (``ordered``), and eight passes of four bits narrow down which of them the last
token kept has.
"""

import triton
import triton.language as tl

BINS: tl.constexpr = tl.constexpr(16)  # four bits
LAST_PASS: tl.constexpr = tl.constexpr(7)
# columns of a search's state, per pass and row: leading bits, mass above them, target, unused
STATE: tl.constexpr = tl.constexpr(4)


@triton.jit
def ordered(x):
    """Map float32 x to int64 in [0, 2^32) with the same order: equal for both zeros, 0 for NaN."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, key.to(tl.int64) + 2147483648, 0)


@triton.jit
def logit_of(key):
    """Return the float32 that ``ordered`` maps to this key."""
    signed = (key - 2147483648).to(tl.int32)
    return tl.where(signed < 0, signed ^ 0x7FFFFFFF, signed).to(tl.float32, bitcast=True)


@triton.jit
def weight(x, largest, temperature):
    """The likelihood relative to the likeliest token, float32 in [0, 1]; 0 for NaN."""
    relative = tl.exp((x - largest) / temperature)
    return tl.where(relative == relative, relative, 0.0)


@triton.jit
def mass(weights, MASS_SCALE: tl.constexpr):
    """Convert weights to int64 multiples of 1 / MASS_SCALE, whose sum over a whole row stays below 2^63."""
    return (weights * MASS_SCALE).to(tl.int64)


@triton.jit
def _row_maximum(maxima, row, NUM_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr):
    blocks = tl.arange(0, BLOCKS)
    return tl.max(
        tl.load(maxima + row * NUM_BLOCKS + blocks, mask=blocks < NUM_BLOCKS, other=float("-inf")), axis=0
    )


@triton.jit
def survey_kernel(logits, maxima, places, not_finite, size, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Find for each block the largest logit, its lowest id, and whether the block holds a NaN or an infinity.
    NaN is never the largest."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * size + ids, mask=ids < size, other=0.0)
    is_bad = (x != x) | (tl.abs(x) == float("inf"))
    tl.store(not_finite + row * NUM_BLOCKS + block, tl.max(is_bad.to(tl.int32), axis=0))
    x = tl.where((ids < size) & (x == x), x, float("-inf"))
    largest = tl.max(x, axis=0)
    tl.store(maxima + row * NUM_BLOCKS + block, largest)
    tl.store(places + row * NUM_BLOCKS + block, tl.min(tl.where(x == largest, ids, size), axis=0))


@triton.jit
def finish_survey_kernel(
    maxima, places, not_finite, is_finite, likeliest, size, NUM_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS)
    inside = blocks < NUM_BLOCKS
    largest = tl.load(maxima + row * NUM_BLOCKS + blocks, mask=inside, other=float("-inf"))
    place = tl.load(places + row * NUM_BLOCKS + blocks, mask=inside, other=size)
    best = tl.min(tl.where(largest == tl.max(largest, axis=0), place, size), axis=0)
    tl.store(likeliest + row, tl.minimum(best, size - 1).to(tl.int64))
    bad = tl.max(tl.load(not_finite + row * NUM_BLOCKS + blocks, mask=inside, other=0), axis=0)
    tl.store(is_finite + row, (bad == 0).to(tl.int8))


@triton.jit
def search_state(
    states,
    bins,
    row,
    num_rows,
    finished,
    top_p,
    BY_MASS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Read the search after pass ``finished``, one digit further -> (leading bits, mass above them, target).

    The target is the mass, or the number, that the kept tokens have to reach.
    """
    # The interpreter multiplies tensors by constants, not constants by tensors.
    state = states + (num_rows * finished + row) * STATE
    bits, above, target = tl.load(state), tl.load(state + 1), tl.load(state + 2)
    blocks, digits = tl.arange(0, BLOCKS), tl.arange(0, BINS)
    place = ((num_rows * (finished % 2) + row) * NUM_BLOCKS + blocks)[:, None] * BINS + digits[None, :]
    each = tl.sum(tl.load(bins + place, mask=(blocks < NUM_BLOCKS)[:, None], other=0), axis=0)  # [BINS]
    if BY_MASS:
        if finished == 0:
            total = tl.sum(each, axis=0)
            wanted = tl.load(top_p + row) * total.to(tl.float64)
            whole = wanted.to(tl.int64)
            whole += (whole.to(tl.float64) < wanted).to(tl.int64)
            target = tl.maximum(tl.minimum(whole, total), 1)  # the likeliest token is always kept
    # mass of the tokens with digit d and above
    reached = above + tl.sum(tl.where(digits[None, :] >= digits[:, None], each[None, :], 0), axis=1)
    digit = tl.max(tl.where(reached >= target, digits, 0), axis=0)
    above += tl.sum(tl.where(digits > digit, each, 0), axis=0)
    return bits * BINS + digit, above, target


@triton.jit(do_not_specialize=["step", "num_rows"])
def search_kernel(
    logits,
    maxima,
    temperature,
    top_p,
    states,
    bins,
    step,
    num_rows,
    size,
    BY_MASS: tl.constexpr,
    MASS_SCALE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Run pass ``step`` over one block: sum the mass (or number) of its tokens for each next digit, among the
    tokens with the leading bits so far."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if BY_MASS:
        if tl.load(top_p + row) >= 1.0:
            return
    bits = row * 0
    if step > 0:
        bits, above, target = search_state(
            states, bins, row, num_rows, step - 1, top_p, BY_MASS, NUM_BLOCKS, BLOCKS
        )
        if block == 0:
            state = states + (step * num_rows + row) * STATE
            tl.store(state, bits)
            tl.store(state + 1, above)
            tl.store(state + 2, target)
    if BY_MASS:
        largest, warmth = _row_maximum(maxima, row, NUM_BLOCKS, BLOCKS), tl.load(temperature + row)
    shift = 28 - 4 * step
    bins_of_digits = tl.arange(0, BINS)
    sums = tl.zeros([BINS, CHUNK], dtype=tl.int64)
    for start in range(0, BLOCK, CHUNK):
        ids = block * BLOCK + start + tl.arange(0, CHUNK)
        x = tl.load(logits + row * size + ids, mask=ids < size, other=float("nan"))
        key = ordered(x)
        matches = (ids < size) & ((key >> (shift + 4)) == bits)
        if tl.max(matches.to(tl.int32), axis=0) > 0:  # seldom true after a few passes
            digits = tl.where(matches, (key >> shift) & (BINS - 1), -1).to(tl.int32)
            masses = matches.to(tl.int64)
            if BY_MASS:
                masses = mass(weight(x, largest, warmth), MASS_SCALE)
            sums += tl.where(digits[None, :] == bins_of_digits[:, None], masses[None, :], 0)
    place = bins + ((num_rows * (step % 2) + row) * NUM_BLOCKS + block) * BINS
    tl.store(place + bins_of_digits, tl.sum(sums, axis=1))
