"""Norms, GeGLU and the fused QK-norm, rotation and cache write equal the reference."""

from typing import Any

import pytest
import torch

from tests.model.ops.cuda.harness import DEVICE, DTYPES, cuda_ops, on_device, randn, reference_ops

pytestmark = on_device

# float32: sums in another order and another exponential, a few units in the last place each. bfloat16: both
# sides round once or more, and may land on neighbouring values: two units of 2^-8.
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 4e-6, "atol": 4e-6},
    torch.bfloat16: {"rtol": 2.0**-7, "atol": 2.0**-8},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 640), (2, 1152), (1, 5376), (3, 17), (2, 1), (0, 8)])
def test_norms_equal_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = (randn(*shape, seed=1) * 3).to(dtype), (randn(*shape, seed=2) * 10).to(dtype)
    first, second = randn(shape[1], seed=3) + 1, randn(shape[1], seed=4) + 1
    ops, reference = cuda_ops(dtype), reference_ops(dtype)
    there = [tensor.to(DEVICE) for tensor in (x, first, second)]
    normed = ops.rms_norm(there[0], there[1], 1e-6)
    torch.testing.assert_close(normed.cpu(), reference.rms_norm(x, first, 1e-6), **TOLERANCE[dtype])
    ours, theirs = residual.to(DEVICE, copy=True), residual.clone()
    normed = ops.norm_add_norm(there[0], ours, there[1], there[2], 1e-6)
    expected = reference.norm_add_norm(x, theirs, first, second, 1e-6)
    torch.testing.assert_close(ours.cpu(), theirs, **TOLERANCE[dtype])
    torch.testing.assert_close(normed.cpu(), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2048), (3, 1025), (3, 5), (2, 1), (0, 4)])
def test_geglu_equals_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (randn(shape[0], 2 * shape[1]) * 4).to(dtype)
    torch.testing.assert_close(
        cuda_ops(dtype).geglu(x.to(DEVICE)).cpu(), reference_ops(dtype).geglu(x), **TOLERANCE[dtype]
    )


def test_geglu_is_accurate_from_the_smallest_to_the_largest_gates() -> None:
    gate = torch.cat(
        (torch.linspace(-40, 40, 4001), torch.tensor([-1e30, -1e4, -1e-30, 0.0, 1e-30, 1e4, 1e30]))
    )
    both = torch.cat((gate, torch.ones_like(gate)))[None]
    wide = gate.double()
    exact = wide * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))
    result = cuda_ops(torch.float32).geglu(both.to(DEVICE))[0].cpu()
    # The argument of the exponential, up to 87, is off by its own rounding.
    torch.testing.assert_close(result.double(), exact, rtol=2e-5, atol=1e-8)


def test_not_finite_inputs_stay_visible() -> None:
    ops = cuda_ops(torch.float32)
    x = randn(3, 64)
    x[1, 5] = torch.nan
    x = x.to(DEVICE)
    for result in (ops.rms_norm(x, torch.ones(64, device=DEVICE), 1e-6), ops.geglu(x)):
        assert result[1].isnan().any()
        assert result[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "block_size", "interleaved"),
    [(1, 4, 1, 256, 16, False), (17, 1, 1, 128, 8, True), (3, 2, 2, 32, 1, True), (20, 1, 1, 24, 4, False)],
)
def test_rope_and_cache_write_equal_the_reference(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    interleaved: bool,
    dtype: torch.dtype,
) -> None:
    qkv = randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    q_scale, k_scale = randn(head_dim, seed=1), randn(head_dim, seed=2)
    angles = randn(num_tokens, head_dim // 2, seed=3) * 100
    num_blocks = 2 + num_tokens // block_size
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(4))[:num_tokens]
    results = []
    for ops in (cuda_ops(dtype), reference_ops(dtype)):
        both = torch.full(
            (num_blocks, 2, block_size, num_kv_heads, head_dim), -7.0, dtype=dtype, device=ops.device
        )
        caches = (
            (both[:, 0], both[:, 1]) if interleaved else (both[:, 0].contiguous(), both[:, 1].contiguous())
        )
        values = [tensor.to(ops.device) for tensor in (qkv, q_scale, k_scale, angles.cos(), angles.sin())]
        q, qs, ks, cos, sin = values
        keys, vals = caches
        query = ops.qk_norm_rope_cache_write(q, qs, ks, cos, sin, keys, vals, slots.to(ops.device), 1e-6)
        results.append([tensor.cpu() for tensor in (query, *caches)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE[dtype])
    assert torch.equal(results[0][2], results[1][2])  # values are copied as they are


def test_a_token_without_a_slot_writes_nothing() -> None:
    """The padding of a decode batch."""
    ops = cuda_ops(torch.float32)
    caches = [torch.full((3, 4, 1, 16), -7.0, device=DEVICE) for _ in range(2)]
    values = [
        tensor.to(DEVICE)
        for tensor in (randn(2, 48), torch.ones(16), torch.ones(16), randn(2, 8), randn(2, 8))
    ]
    q, qs, ks, cos, sin = values
    keys, vals = caches
    slots = torch.tensor([5, -1], device=DEVICE)
    ops.qk_norm_rope_cache_write(q, qs, ks, cos, sin, keys, vals, slots, 1e-6)
    for cache in caches:
        written = (cache.view(12, 16) != -7.0).all(-1)
        assert written.nonzero()[:, 0].tolist() == [5]
