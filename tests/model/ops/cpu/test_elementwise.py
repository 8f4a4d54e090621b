"""Norms, GeGLU and the fused QK-norm, rotation and cache write equal the reference."""

from typing import Any

import pytest
import torch

from tests.model.ops.cpu.harness import CACHED, DTYPES, cpu_ops, every_instruction_set, reference_ops

pytestmark = every_instruction_set

# float32: sums in another order and an exponential of our own, a few units in the last place each. bfloat16:
# both sides round once or more, and may land on neighbouring values: two units of 2^-8.
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 4e-6, "atol": 4e-6},
    torch.bfloat16: {"rtol": 2.0**-7, "atol": 2.0**-8},
}
SHAPES = [(1, 640), (5, 640), (33, 1152), (64, 2560), (3, 17), (2, 1), (130, 100)]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_equal_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = (randn(*shape, seed=1) * 3).to(dtype), (randn(*shape, seed=2) * 10).to(dtype)
    first, second = randn(shape[1], seed=3) + 1, randn(shape[1], seed=4) + 1
    ops, reference = cpu_ops(dtype), reference_ops(dtype)
    torch.testing.assert_close(
        ops.rms_norm(x, first, 1e-6), reference.rms_norm(x, first, 1e-6), **TOLERANCE[dtype]
    )
    ours, theirs = residual.clone(), residual.clone()
    normed = ops.norm_add_norm(x, ours, first, second, 1e-6)
    expected = reference.norm_add_norm(x, theirs, first, second, 1e-6)
    torch.testing.assert_close(ours, theirs, **TOLERANCE[dtype])
    torch.testing.assert_close(normed, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_do_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    ops = cpu_ops(dtype)
    x, scale = randn(70, 640).to(dtype), randn(640, seed=1)
    assert torch.equal(
        ops.rms_norm(x, scale, 1e-6), torch.cat([ops.rms_norm(row[None], scale, 1e-6) for row in x])
    )
    assert torch.equal(ops.geglu(x), torch.cat([ops.geglu(row[None]) for row in x]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2048), (7, 6912), (40, 2048), (3, 5), (2, 1)])
def test_geglu_equals_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (randn(shape[0], 2 * shape[1]) * 4).to(dtype)
    torch.testing.assert_close(cpu_ops(dtype).geglu(x), reference_ops(dtype).geglu(x), **TOLERANCE[dtype])


def test_geglu_is_accurate_from_the_smallest_to_the_largest_gates() -> None:
    gate = torch.cat(
        (torch.linspace(-40, 40, 4001), torch.tensor([-1e30, -1e4, -1e-30, 0.0, 1e-30, 1e4, 1e30]))
    )
    both = torch.cat((gate, torch.ones_like(gate)))[None]
    wide = gate.double()
    exact = wide * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))
    result = cpu_ops(torch.float32).geglu(both)[0]
    # The argument of the exponential, up to 87, is off by its own rounding. The exponential is clamped at
    # e^88, so that a gate of
    # -1e30 leaves -4e-9 where nothing should be left.
    torch.testing.assert_close(result.double(), exact, rtol=2e-5, atol=1e-8)


def test_not_finite_inputs_stay_visible() -> None:
    ops = cpu_ops(torch.float32)
    x = randn(3, 64)
    x[1, 5] = torch.nan
    for result in (ops.rms_norm(x, torch.ones(64), 1e-6), ops.geglu(x)):
        assert result[1].isnan().any()
        assert result[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHED)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(1, 4, 1, 256, 16), (37, 4, 1, 256, 16), (9, 8, 4, 128, 8), (5, 2, 2, 32, 1), (6, 3, 1, 24, 4)],
)
def test_rope_and_cache_write_equal_the_reference(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    interleaved: bool,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> None:
    qkv = randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    q_scale, k_scale = randn(head_dim, seed=1), randn(head_dim, seed=2)
    angles = randn(num_tokens, head_dim // 2, seed=3) * 100
    num_blocks = 2 + num_tokens // block_size
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(4))[:num_tokens]
    results = []
    for ops in (cpu_ops(dtype), reference_ops(dtype)):
        both = torch.full((num_blocks, 2, block_size, num_kv_heads, head_dim), -7.0, dtype=cache_dtype)
        caches = (
            (both[:, 0], both[:, 1]) if interleaved else (both[:, 0].contiguous(), both[:, 1].contiguous())
        )
        query = ops.qk_norm_rope_cache_write(
            qkv, q_scale, k_scale, angles.cos(), angles.sin(), *caches, slots, 1e-6
        )
        results.append((query, *caches))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE[ours.dtype])
    assert torch.equal(results[0][2], results[1][2])  # values are no more than rounded to the cache's type
