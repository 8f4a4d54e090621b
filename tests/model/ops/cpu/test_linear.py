"""Linear layers: every storage equals the exact product within the bound of float32 sums; rows do not
influence each other."""

import pytest
import torch

from model.ops.cpu.weights import WeightStorage
from model.precision import GROUP
from tests.model.ops.cpu.harness import DTYPES, ROUNDING, cpu_ops, every_instruction_set, random_case
from tests.model.ops.cpu.weights import STORAGES, stored_case

pytestmark = every_instruction_set

SHAPES = [(1, 1), (7, 3), (16, 8), (33, 65), (129, 640), (640, 1025), (100, 513), (64, 2048)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 13, 32, 61, 250, 500]


def assert_product(
    actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, stored: torch.Tensor, extra: float = 0.0
) -> None:
    """Within the bound of a chain of in_features fused multiply-adds, and one rounding to the output's
    type."""
    expected = x.double() @ stored.double().T
    magnitude = x.double().abs() @ stored.double().abs().T
    bound = magnitude * (weight.shape[1] * 2.0**-24 + extra) + expected.abs() * ROUNDING[actual.dtype] * 1.01
    assert ((actual.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weights", ["exact", "float32", "bfloat16"])
def test_equals_the_exact_product_of_the_stored_weight(
    weights: WeightStorage, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    ops = cpu_ops(dtype, weights)
    for rows in (0, 1, 2, 5, 8, 61):
        x, weight = random_case(rows, *shape, dtype)
        packed = ops.pack_linear(weight, "down")
        stored = weight.bfloat16() if weights == "bfloat16" else weight
        result = ops.linear(x, packed)
        assert result.dtype == dtype
        assert_product(result, x, weight, stored)
        logits = ops.logits(x, packed)
        assert logits.dtype == torch.float32
        assert_product(logits, x, weight, stored)


def test_large_batches_in_several_chunks_of_rows() -> None:
    x, weight = random_case(1000, 70, 700, torch.float32)
    for weights in ("float32", "bfloat16"):
        ops = cpu_ops(torch.float32, weights)
        stored = weight if weights == "float32" else weight.bfloat16()
        assert_product(ops.linear(x, ops.pack_linear(weight, "down")), x, weight, stored)


def test_exact_storage_takes_bfloat16_only_where_it_loses_nothing() -> None:
    ops = cpu_ops(torch.float32)
    _, weight = random_case(1, 64, 64, torch.float32)
    assert ops.pack_linear(weight, "qkv").storage == "float32"  # type: ignore[attr-defined]
    assert ops.pack_linear(weight.bfloat16().float(), "qkv").storage == "bfloat16"  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 32), (33, 64), (129, 640), (70, 2048)])
def test_int8_is_within_half_a_step_of_every_weight(shape: tuple[int, int], dtype: torch.dtype) -> None:
    ops = cpu_ops(dtype, "int8")
    for rows in (1, 2, 5, 8, 61):
        x, weight = random_case(rows, *shape, dtype)
        packed = ops.pack_linear(weight, "down")
        # A weight is off by half a step of its group (largest / 127, whose float16 is off by 2^-11), an input
        # by 2^-16 of its row's largest.
        groups = weight.float().view(shape[0], -1, GROUP)
        steps = (groups.abs().amax(-1, keepdim=True) / 127).expand_as(groups).reshape(shape).double()
        bound = x.double().abs() @ (steps * 0.5 + weight.double().abs() * 2.0**-10).T
        bound += x.double().abs().amax(-1, keepdim=True) * 2.0**-15 * weight.double().abs().sum(-1)
        expected = x.double() @ weight.double().T
        bound += expected.abs() * ROUNDING[dtype]
        assert ((ops.linear(x, packed).double() - expected).abs() <= bound * 1.01 + 1e-6).all()


def test_int8_keeps_a_q8_0_weight_exactly() -> None:
    """Weights that already are float16 scale times int8 in groups of 32 are stored without loss."""
    generator = torch.Generator().manual_seed(3)
    levels = torch.randint(-127, 128, (40, 4, GROUP), generator=generator)
    levels[:, :, 5] = 127  # quantisers put the largest of a group at the end of the range
    scales = (torch.rand(40, 4, 1, generator=generator) * 0.01 + 1e-4).half().float()
    weight = (levels * scales).view(40, -1)
    ops = cpu_ops(torch.float32, "int8")
    # Powers of two and zeros pass the inputs' rounding to 16 bits unharmed only one at a time; so ask for one
    # column at a time.
    x = torch.eye(weight.shape[1])
    result = ops.linear(x, ops.pack_linear(weight, "head"))
    torch.testing.assert_close(result, weight.T, rtol=2.0**-22, atol=0)  # three roundings in float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("shape", [(129, 640), (65, 1056)])
def test_a_row_is_the_same_bits_in_every_batch(
    storage: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    ops, x, packed = stored_case(storage, max(ROWS), *shape, dtype)
    alone = torch.cat([ops.linear(row[None], packed) for row in x])
    for rows in ROWS:
        assert torch.equal(ops.linear(x[:rows], packed), alone[:rows])
        assert torch.equal(ops.linear(x[-rows:], packed), alone[-rows:])


@pytest.mark.parametrize("storage", STORAGES)
def test_the_number_of_threads_changes_no_bit(storage: str) -> None:
    ops, x, packed = stored_case(storage, 120, 300, 640, torch.float32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            results.append(ops.linear(x, packed))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_shows_and_stays_alone(storage: str, poison: float) -> None:
    ops, x, packed = stored_case(storage, 6, 64, 96, torch.float32)
    clean = ops.linear(x, packed)
    x[2, 17] = poison
    dirty = ops.linear(x, packed)
    assert not torch.isfinite(dirty[2]).any()
    assert torch.equal(dirty[3:], clean[3:])
    assert torch.equal(dirty[:2], clean[:2])
