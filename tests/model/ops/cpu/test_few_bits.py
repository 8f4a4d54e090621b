"""Weights of 4 and 5 bits: what they keep exactly, how far off the others are, and what falls back to 8
bits."""

from collections.abc import Callable

import pytest
import torch

from model.ops.cpu.weights import PackedWeight, WeightStorage
from model.precision import GROUP
from tests.model.ops.cpu.harness import DTYPES, ROUNDING, cpu_ops, every_instruction_set, random_case
from tests.model.ops.cpu.weights import panel_features, q4_0, q4_k, q5_0, q5_1, stored_case, stored_weight

pytestmark = every_instruction_set


def test_int4_rounds_no_group_worse_than_evenly_between_its_ends() -> None:
    ops = cpu_ops(torch.float32, "int4")
    _, weight = random_case(1, 45, 128, torch.float32)
    weight[3, 32:64] = 0
    packed = ops.pack_linear(weight, "down")
    assert isinstance(packed, PackedWeight)
    padded = -(-45 // panel_features(ops)) * panel_features(ops)
    # half a byte a weight and two float16 a group
    assert packed.nbytes == 64 + padded * 128 // 2 + padded * 4 * 2 * 2
    groups = weight.view(45, 4, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    low, step = low.half().float(), ((high - low) / 15).half().float()
    rounded = torch.where(step == 0, low, ((groups - low) / step).round().clamp(0, 15) * step + low)
    errors, plain = (
        (stored_weight(packed).view(45, 4, GROUP) - groups).square().sum(-1),
        (rounded - groups).square().sum(-1),
    )
    assert (errors <= plain * 1.01 + 1e-9).all()
    assert errors.sum() < plain.sum() * 0.97
    assert ops.pack_linear(weight, "head").storage == "int8"  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_keeps_what_lies_on_16_steps(dtype: torch.dtype) -> None:
    """Wherever the steps lie about zero, and however few of them there are."""
    generator = torch.Generator().manual_seed(5)
    lowest = torch.arange(-17, 4).view(-1, 1, 1)
    levels = lowest + torch.randint(0, 16, (21, 3, GROUP), generator=generator)
    levels[:, :, 7], levels[:, :, 9] = lowest[:, :, 0], lowest[:, :, 0] + 15
    levels[:, 2, :] = lowest[:, 0]  # a single value
    scales = (torch.rand(21, 3, 1, generator=generator) * 0.01 + 1e-3).half().float()
    weight = torch.cat([(levels * scales).view(21, -1), q4_k(21, 96)]).to(dtype)
    packed = cpu_ops(dtype, "int4").pack_linear(weight, "down")
    assert isinstance(packed, PackedWeight)
    off = (stored_weight(packed) - weight.float()).abs().view(42, 3, GROUP)
    largest = weight.float().abs().view(42, 3, GROUP).amax(-1, keepdim=True)
    # float16 ends and steps; bfloat16 weights
    assert (off <= largest * (2.0**-10 if dtype == torch.float32 else 2.0**-7)).all()


@pytest.mark.parametrize(
    ("kind", "dtype", "group_bytes"),
    [
        *((q4_0, dtype, GROUP // 2 + 2) for dtype in DTYPES),
        *((q4_k, dtype, GROUP // 2 + 2 * 2) for dtype in DTYPES),
        *((q5_0, dtype, GROUP * 5 // 8 + 2) for dtype in DTYPES),
        (q5_1, torch.float32, GROUP * 5 // 8 + 2 * 2),
    ],
)
@pytest.mark.parametrize("shape", [(1, 32), (33, 96), (129, 640)])
def test_weights_of_5_bits_and_less_stay_such(
    kind: Callable[..., torch.Tensor], group_bytes: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """A weight is off by what float16 scales (and bfloat16 weights) are, an input by half of a 127th of its
    group's largest."""
    ops = cpu_ops(dtype, "int8")
    weight = kind(*shape, dtype)
    packed = ops.pack_linear(weight, "down")
    assert isinstance(packed, PackedWeight)
    assert packed.storage == "int5"
    num_panels, groups = -(-shape[0] // panel_features(ops)), shape[1] // GROUP
    header = -(-8 * (num_panels + 1) // 64) * 64
    assert packed.nbytes == header + num_panels * panel_features(ops) * groups * group_bytes
    stored = stored_weight(packed).double()
    off = (stored - weight.double()).abs().view(shape[0], groups, GROUP)
    largest = weight.double().abs().view(shape[0], groups, GROUP).amax(-1, keepdim=True)
    assert (off <= largest * (2.0**-10 if dtype == torch.float32 else 2.0**-7)).all()
    if kind in (q4_0, q5_0) and dtype == torch.float32:
        assert off.max() == 0
    for rows in (0, 1, 2, 3, 5, 6, 8, 13, 61):
        x, _ = random_case(rows, *shape, dtype, seed=rows)
        tops = x.double().abs().view(rows, groups, GROUP).amax(-1)
        expected = x.double() @ stored.T
        bound = tops / 254 @ stored.abs().view(shape[0], groups, GROUP).sum(-1).T
        bound = bound * (1 + 2.0**-16) + expected.abs() * ROUNDING[dtype] + 1e-6
        actual = ops.linear(x, packed)
        assert actual.dtype == dtype
        assert ((actual.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    ("lowest", "highest", "offset"), [(-8, 7, 0.0), (0, 15, -0.75), (-16, 15, 0.0), (0, 31, -0.75)]
)
def test_the_largest_sums_are_exact(lowest: int, highest: int, offset: float) -> None:
    """All inputs at 127 steps, nearly all weights at one end of theirs."""
    ops = cpu_ops(torch.float32, "int8")
    for end in (lowest, highest):
        weight = torch.full((40, 64), float(end))
        # the only grid
        for place, step in enumerate((lowest, highest, lowest + 1, lowest + 2, (lowest + highest) // 2)):
            weight[:, place::GROUP] = step
        weight = weight / 16 + offset
        packed = ops.pack_linear(weight, "down")
        assert isinstance(packed, PackedWeight)
        assert packed.storage == "int5"
        for sign in (1.0, -1.0):
            x = torch.full((3, 64), sign)
            torch.testing.assert_close(ops.linear(x, packed), x @ weight.T, rtol=1e-5, atol=1e-4)


def test_panels_beyond_5_bits_are_kept_in_8_unless_they_are_many() -> None:
    ops = cpu_ops(torch.float32, "int8")
    size = panel_features(ops)
    weight = q5_0(8 * size - 3, 128)
    _, rough = random_case(1, 3 * size, 128, torch.float32)
    weight[size + 1] = rough[0]
    weight[7 * size :] = rough[: size - 3]
    packed = ops.pack_linear(weight, "down")
    assert isinstance(packed, PackedWeight)
    assert packed.storage == "int5"
    off = (stored_weight(packed) - weight).abs().view(-1, 4, GROUP)
    assert off[:size].max() < 1e-7
    assert off[2 * size : 7 * size].max() < 1e-7
    steps = weight.abs().view(-1, 4, GROUP).amax(-1, keepdim=True) / 127
    assert (off <= steps * 0.51 * (1 + 2.0**-4)).all()
    weight[: 3 * size] = rough
    assert ops.pack_linear(weight, "down").storage == "int8"  # type: ignore[attr-defined]
    assert ops.pack_linear(q5_0(40, 128), "head").storage == "int8"  # type: ignore[attr-defined]


def outliers() -> torch.Tensor:
    """A large value among small ones is no grid of two steps."""
    _, weight = random_case(1, 40, 96, torch.float32)
    weight[:, ::GROUP] = 3.0
    return weight


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(random_case(1, 40, 96, torch.float32)[1], id="random"),
        pytest.param(outliers(), id="outliers"),
        pytest.param(q5_0(40, 96) * 2.0**24, id="steps beyond float16"),
        pytest.param(torch.full((40, 96), 1e6), id="one value beyond float16"),
        pytest.param(q5_0(40, 96) * 2.0**-22, id="steps below float16"),
    ],
)
def test_what_5_bits_cannot_hold_stays_int8(weight: torch.Tensor) -> None:
    packed = cpu_ops(torch.float32, "int8").pack_linear(weight, "down")
    assert isinstance(packed, PackedWeight)
    assert packed.storage == "int8"
    assert torch.isfinite(stored_weight(packed)).all()


@pytest.mark.parametrize("wanted", ["int8", "int4"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_shows(wanted: WeightStorage, poison: float) -> None:
    for make in (q5_0, lambda n, k: random_case(1, n, k, torch.float32)[1]):
        weight = make(70, 96)
        weight[5, 40] = poison
        x, _ = random_case(3, 70, 96, torch.float32)
        ops = cpu_ops(torch.float32, wanted)
        result = ops.linear(x, ops.pack_linear(weight, "down"))
        assert not torch.isfinite(result[:, 5]).any()
        assert torch.isfinite(result[:, :5]).all()
        assert torch.isfinite(result[:, 6:]).all()


@pytest.mark.parametrize("storage", ["int8", "int5", "int4"])
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38, 1e-33, 1e-20, 1e30])
def test_inputs_far_from_one(storage: str, size: float) -> None:
    """Inputs below 10^-30 may count as zeros."""
    ops, x, packed = stored_case(storage, 3, 70, 96, torch.float32)
    x[:, ::3] = 0
    result, ones = ops.linear(x * size, packed).double(), ops.linear(x, packed).double()
    torch.testing.assert_close(result, ones * size, rtol=1e-4, atol=max(size * 1e-4, 1e-28))
