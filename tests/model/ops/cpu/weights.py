"""Weights for the tests of linear layers: of a few bits, as GGUF's types hold them, and in each of the
kernels' forms."""

import torch

from model.ops.cpu.backend import CpuOps
from model.ops.cpu.weights import PackedWeight
from model.precision import GROUP
from tests.model.ops.cpu.harness import cpu_ops, random_case

STORAGES = ["float32", "bfloat16", "int8", "int5", "int4"]


def q5_0(
    out_features: int,
    in_features: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    levels: int = 16,
) -> torch.Tensor:
    """Weights as GGUF's Q5_0 holds them: a float16 scale, which may be negative, times [-16, 16) for each
    group."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(-levels, levels, (out_features, in_features // GROUP, GROUP), generator=generator)
    scales = (torch.rand(*steps.shape[:2], 1, generator=generator) * 0.01 + 1e-4).half().float()
    scales[:, ::2] *= -1
    return (steps * scales).view(out_features, in_features).to(dtype)


def q4_0(
    out_features: int, in_features: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """Weights as GGUF's Q4_0 holds them: likewise [-8, 8)."""
    return q5_0(out_features, in_features, dtype, seed, levels=8)


def q5_1(
    out_features: int, in_features: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """Weights as GGUF's Q5_1 holds them: a float16 scale times [0, 32), plus a float16 minimum."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 32, (out_features, in_features // GROUP, GROUP), generator=generator)
    scales, places = torch.rand(2, *steps.shape[:2], 1, generator=generator)
    scales = (scales * 0.01 + 1e-4).half().float()
    minimum = (-32 * scales * places).half().float()
    weights: torch.Tensor = steps * scales + minimum
    return weights.view(out_features, in_features).to(dtype)


def q4_k(
    out_features: int, in_features: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """Weights as GGUF's Q4_K holds them: d * scale * [0, 16) - dmin * minimum with 6-bit scales and minima,
    zero in the range."""
    generator = torch.Generator().manual_seed(seed)
    shape = out_features, in_features // GROUP
    levels = torch.randint(0, 16, (*shape, GROUP), generator=generator)
    d = (torch.rand(out_features, 1, 1, generator=generator) * 1e-3 + 1e-4).half().float()
    dmin = (d * 15).half().float()
    scale = torch.randint(0, 64, (*shape, 1), generator=generator)
    minimum = (torch.rand(*shape, 1, generator=generator) * scale).round()
    return (d * scale * levels - dmin * minimum).view(out_features, in_features).to(dtype)


def panel_features(ops: CpuOps) -> int:
    return 32 if "AVX-512" in ops.name else 16


def stored_case(
    storage: str, rows: int, out_features: int, in_features: int, dtype: torch.dtype
) -> tuple[CpuOps, torch.Tensor, PackedWeight]:
    """A weight that really is kept in that form; of 5 bits with one panel of 8 among them."""
    ops = cpu_ops(dtype, "int8" if storage == "int5" else storage)  # type: ignore[arg-type]
    x, weight = random_case(rows, out_features, in_features, dtype)
    if storage == "int5":
        rest = panel_features(ops) if out_features > 3 * panel_features(ops) else 0
        weight[rest:] = q5_0(out_features - rest, in_features, dtype)
    packed = ops.pack_linear(weight, "down")
    assert isinstance(packed, PackedWeight)
    assert packed.storage == storage
    return ops, x, packed


def stored_weight(packed: PackedWeight) -> torch.Tensor:
    """What a weight of few bits is kept as: a single one among zeros passes the inputs' rounding unharmed."""
    return cpu_ops(torch.float32).linear(torch.eye(packed.in_features), packed).T
