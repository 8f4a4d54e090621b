"""Paged attention equals the reference on every mix of chunks, reads nothing unseen, and depends on nothing
but the row."""

from typing import Any

import pytest
import torch

from tests.model.ops.cpu.harness import (
    CACHED,
    AttentionCase,
    attention_case,
    cpu_ops,
    every_instruction_set,
    reference_ops,
)

pytestmark = every_instruction_set

# Softmax and sums in another order; in bfloat16 both sides round their result once, to neighbouring values at
# worst.
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2.0**-7, "atol": 2.0**-10},
}
SCALE = 0.17


def run(case: AttentionCase, dtype: torch.dtype) -> torch.Tensor:
    return cpu_ops(dtype).paged_attention(case.query, case.keys, case.values, case.metadata, SCALE)


def assert_equals_reference(case: AttentionCase, dtype: torch.dtype) -> None:
    expected = reference_ops(dtype).paged_attention(case.query, case.keys, case.values, case.metadata, SCALE)
    result = run(case, dtype)
    assert result.isfinite().all()
    torch.testing.assert_close(result, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHED)
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ((1,), (1,)),
        ((1,), (256,)),
        ((1,), (257,)),
        ((1,), (1500,)),
        ((1, 1, 1), (15, 16, 17)),
        ((1, 5, 1, 40), (700, 5, 1, 300)),
        ((3,), (1030,)),
        ((300,), (300,)),
        ((70, 70), (600, 70)),
        ((17, 1) * 6, (17, 90) * 6),
    ],
)
@pytest.mark.parametrize("window", [None, 64])
def test_equals_the_reference(
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    window: int | None,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> None:
    case = attention_case(1, query_lens, context_lens, window=window, dtype=dtype, cache_dtype=cache_dtype)
    assert_equals_reference(case, dtype)


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHED)
@pytest.mark.parametrize(
    "shape",
    [
        {"num_heads": 4, "num_kv_heads": 1, "head_dim": 256},
        {"num_heads": 8, "num_kv_heads": 4, "head_dim": 256},
        {"num_heads": 32, "num_kv_heads": 16, "head_dim": 128},
        {"num_heads": 3, "num_kv_heads": 1, "head_dim": 16},
        {"num_heads": 5, "num_kv_heads": 5, "head_dim": 8},
        {"num_heads": 7, "num_kv_heads": 1, "head_dim": 48},
        {"num_heads": 2, "num_kv_heads": 1, "head_dim": 20},
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "interleaved": True},
        {"block_size": 1},
        {"block_size": 3},
        {"block_size": 64},
        {"block_size": 512},
    ],
    ids=lambda shape: "-".join(f"{value}" for value in shape.values()),
)
@pytest.mark.parametrize("window", [None, 96])
def test_shapes(
    shape: dict[str, Any], window: int | None, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    case = attention_case(
        2, (1, 19, 1), (530, 290, 33), window=window, dtype=dtype, cache_dtype=cache_dtype, **shape
    )
    assert_equals_reference(case, dtype)


@pytest.mark.parametrize(
    "context", [1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257, 319, 320, 321, 511, 512, 513]
)
@pytest.mark.parametrize("queries", [1, 2, 9])
@pytest.mark.parametrize("window", [1, 8, 64, 256])
def test_edges_of_blocks_windows_and_splits(context: int, queries: int, window: int) -> None:
    if queries <= context:
        case = attention_case(3, (queries,), (context,), window=window, block_size=8, head_dim=16)
        assert_equals_reference(case, torch.float32)


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHED)
# 1100: items begin within a span of 1024 keys and go on in the next
@pytest.mark.parametrize("window", [None, 100, 1100])
def test_a_row_is_the_same_bits_alone_in_chunks_and_in_a_batch(
    window: int | None, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    """Chunking a prompt, sharing a step and splitting the context over the cores change no bit."""
    lengths = (90, 1, 33, 1), (2200, 1200, 33, 1300)
    case = attention_case(4, *lengths, window=window, dtype=dtype, cache_dtype=cache_dtype, num_kv_heads=2)
    whole = run(case, dtype)
    for sequence, queries in enumerate(case.metadata.query_lens):
        first_row = int(case.metadata.query_start[sequence])
        for size in (1, 3, 16, 33):
            for first in range(0, queries, size):
                part = case.select(sequence, first, min(size, queries - first))
                rows = slice(first_row + first, first_row + first + part.query.shape[0])
                assert torch.equal(run(part, dtype), whole[rows])


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHED)
@pytest.mark.parametrize(
    ("query_lens", "context_lens", "window"),
    # An item for all splits (one thread), a piece for each split, a piece for each span; spans that end with
    # a split or within, and with a window, first spans of which the item has the end only.
    [
        ((1, 20), (2000, 20), None),
        ((1,), (4 * 2 * 1024,), None),
        ((3,), (9001,), None),
        ((1, 1), (8193, 1025), None),
        ((1,), (3000,), 1500),
        ((3,), (9900,), 8300),
    ],
)
def test_the_number_of_threads_changes_no_bit(
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    window: int | None,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> None:
    case = attention_case(5, query_lens, context_lens, window=window, dtype=dtype, cache_dtype=cache_dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(case, dtype))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert_equals_reference(case, dtype)


def test_large_scores_do_not_overflow() -> None:
    case = attention_case(6, (1, 12), (400, 300))
    case.query *= 1000
    assert_equals_reference(case, torch.float32)


@pytest.mark.parametrize("context", [1, 9, 128, 129])
def test_a_query_that_is_not_a_number_stays_one(context: int) -> None:
    """Also where the maximum of a few scores drops a NaN: what the thread computed before must not show."""
    run(attention_case(6, (1,), (600,)), torch.float32)
    case = attention_case(7, (1,), (context,))
    case.query[0, 1] = torch.nan
    heads = run(case, torch.float32).view(4, -1)
    assert heads[1].isnan().all()
    assert heads[[0, 2, 3]].isfinite().all()
