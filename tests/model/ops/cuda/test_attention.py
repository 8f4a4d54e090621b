"""Paged attention equals the reference on every mix of chunks and decodes, whole and split, and reads nothing
unseen."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from model.ops.cuda.triton import paged_attention
from model.ops.cuda.triton.paged_attention import Device, choose_num_splits
from tests.model.ops.cpu.harness import AttentionCase, attention_case
from tests.model.ops.cuda.harness import DEVICE, DTYPES, cuda_ops, on, on_device, reference_ops

pytestmark = on_device

# float32: a score of up to 15 is a sum of up to 256 products in another order, off by a few 2^-21, and a
# weight is so relative to itself. bfloat16: both sides round their result once, to neighbouring values at
# worst.
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 2e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2.0**-7, "atol": 2.0**-10},
}
SCALE = 0.17


@torch.inference_mode()
def run(case: AttentionCase) -> torch.Tensor:
    case = on(DEVICE, case)
    return (
        cuda_ops(case.query.dtype)
        .paged_attention(case.query, case.keys, case.values, case.metadata, SCALE)
        .cpu()
    )


def assert_equals_reference(case: AttentionCase) -> None:
    dtype = case.query.dtype
    expected = reference_ops(dtype).paged_attention(case.query, case.keys, case.values, case.metadata, SCALE)
    result = run(case)
    assert result.isfinite().all()
    torch.testing.assert_close(result, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ((1,), (1,)),
        ((1,), (300,)),
        ((1, 5, 1, 40, 16, 1), (130, 5, 1, 100, 17, 64)),
        ((70, 33), (75, 130)),
    ],
)
def test_equals_the_reference(
    query_lens: tuple[int, ...], context_lens: tuple[int, ...], window: int | None, dtype: torch.dtype
) -> None:
    assert_equals_reference(attention_case(1, query_lens, context_lens, window=window, dtype=dtype))


@pytest.mark.parametrize(
    "shape",
    [
        {"num_heads": 4, "num_kv_heads": 1, "head_dim": 256},
        {"num_heads": 4, "num_kv_heads": 1, "head_dim": 256, "dtype": torch.bfloat16},
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16, "window": 48},
        {"num_heads": 3, "num_kv_heads": 1, "head_dim": 16, "window": 48},
        {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8},
        {"num_heads": 8, "num_kv_heads": 1, "head_dim": 20, "window": 48},
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "interleaved": True},
        {"block_size": 1, "window": 48},
        {"block_size": 3, "window": 48},
        {"block_size": 128},
    ],
    ids=lambda shape: "-".join(f"{value}" for value in shape.values()),
)
def test_shapes(shape: dict[str, Any]) -> None:
    assert_equals_reference(attention_case(2, (1, 19, 1), (140, 90, 33), **shape))


@pytest.mark.parametrize("window", [None, 8, 65])
def test_edges_of_blocks_windows_and_tiles(window: int | None) -> None:
    """Contexts around every border, each as a decode and as a chunk of nine."""
    contexts = [1, 7, 8, 9, 63, 64, 65, 128, 129]
    lens = [(queries, context) for context in contexts for queries in (1, 9) if queries <= context]
    query_lens, context_lens = zip(*lens, strict=True)
    case = attention_case(3, query_lens, context_lens, window=window, block_size=8, head_dim=16, num_heads=2)
    assert_equals_reference(case)


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("context", [129, 640])
def test_a_split_context_is_put_together(context: int, window: int | None) -> None:
    """One sequence alone leaves the device idle, so its context is split; some splits of the short ones are
    empty."""
    device = Device(num_processors=64, is_hopper=False)
    assert choose_num_splits(1, 1, window, device.num_processors) > 1
    case = attention_case(5, (1,), (context,), window=window, head_dim=16)
    expected = reference_ops(torch.float32).paged_attention(
        case.query, case.keys, case.values, case.metadata, SCALE
    )
    there = on(DEVICE, case)
    with torch.inference_mode():
        result = paged_attention.paged_attention(
            there.query, there.keys, there.values, there.metadata, SCALE, device
        )
    torch.testing.assert_close(result.cpu(), expected, **TOLERANCE[torch.float32])


def test_the_number_of_splits_fills_the_device_and_no_more() -> None:
    assert choose_num_splits(1, 1, None, 132) == 128
    assert choose_num_splits(1, 1, 512, 132) == 4  # a window of 512 keys is worth four parts
    assert choose_num_splits(8, 4, None, 132) == 8
    assert choose_num_splits(256, 1, None, 132) == 1
    assert choose_num_splits(256, 16, 1024, 132) == 1
    assert choose_num_splits(1, 1, 64, 132) == 1


def test_weights_keep_more_than_the_bits_of_bfloat16() -> None:
    """Many equal weights: rounded to bfloat16 each, their sum would be off by far more than the result's own
    rounding."""
    case = attention_case(9, (1,), (100,), head_dim=16, dtype=torch.bfloat16)
    case.values[:] = torch.where(case.values.isnan(), torch.nan, 1.0).to(torch.bfloat16)
    assert (run(case) == 1.0).all()


def test_padding_of_a_decode_batch_yields_zeros() -> None:
    """A context of 0 attends to nothing, whatever its row of the block table says."""
    case = attention_case(7, (1, 1, 1), (40, 33, 1), head_dim=16)
    metadata = case.metadata
    context_lens = metadata.context_lens_tensor.clone()
    context_lens[2] = 0
    padded = replace(case, metadata=replace(metadata, context_lens_tensor=context_lens))
    result, whole = run(padded), run(case)
    assert (result[2] == 0.0).all()
    assert torch.equal(result[:2], whole[:2])


def test_the_contexts_known_to_the_host_do_not_matter() -> None:
    """A CUDA graph is captured with contexts that are not those it is replayed with."""
    case = attention_case(8, (1, 1), (200, 90), head_dim=16)
    other = replace(case, metadata=replace(case.metadata, context_lens=(1, 1)))
    assert torch.equal(run(case), run(other))


def test_large_scores_do_not_overflow() -> None:
    case = attention_case(6, (1, 12), (150, 100), head_dim=16)
    case.query *= 1000
    assert_equals_reference(case)
