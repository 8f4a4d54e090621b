"""The likeliest token without all the logits: always the one that the logits say, for heads and inputs of
every kind."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from model.interface.random_streams import uniforms
from model.ops.cpu.backend import CpuOps
from model.ops.cpu.weights import PackedWeight, put_together, take_apart
from model.precision import GROUP
from tests.model.ops.cpu.harness import DTYPES, cpu_ops, every_instruction_set, random_case
from tests.model.ops.cpu.weights import panel_features, q5_0

pytestmark = every_instruction_set


def pack(ops: CpuOps, weight: torch.Tensor) -> PackedWeight:
    head = ops.pack_linear(weight, "head")
    assert isinstance(head, PackedWeight)
    assert head.sketch is not None
    return head


def greedy(ops: CpuOps, x: torch.Tensor, head: PackedWeight) -> tuple[torch.Tensor, int]:
    """The tokens, and how many panels were computed in full."""
    token_ids = torch.empty(len(x), dtype=torch.int64)
    assert head.sketch is not None
    pointers = head.address, head.sketch.weight.address, head.sketch.spreads.data_ptr(), x.data_ptr()
    is_bfloat16 = int(x.dtype == torch.bfloat16)
    num_panels = ops._library.greedy(
        *pointers, is_bfloat16, len(x), token_ids.data_ptr(), torch.get_num_threads()
    )
    return token_ids, num_panels


def assert_as_the_logits_say(ops: CpuOps, x: torch.Tensor, weight: torch.Tensor) -> None:
    head = pack(ops, weight)
    token_ids = ops.greedy(x, head)
    assert token_ids is not None
    assert token_ids.dtype == torch.int64
    assert token_ids.tolist() == ops.argmax(ops.logits(x, head)).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 32), (7, 96), (16, 64), (17, 640), (33, 1152), (1000, 96), (4099, 640)]
)
def test_is_what_the_logits_say(shape: tuple[int, int], dtype: torch.dtype) -> None:
    ops = cpu_ops(dtype, "int8")
    for rows in (0, 1, 2, 3, 7, 13, 61):
        x, weight = random_case(rows, *shape, dtype, seed=rows)
        assert_as_the_logits_say(ops, x, weight)


def flat(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Rows that are nearly equal."""
    weight[:] = weight[:1] + weight * 1e-3


def repeated(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Ties, of which the lowest id wins."""
    weight[:] = weight[:23].repeat(-(-len(weight) // 23), 1)[: len(weight)]


def all_equal(x: torch.Tensor, weight: torch.Tensor) -> None:
    weight[:] = weight[:1].clone()


def zeros(x: torch.Tensor, weight: torch.Tensor) -> None:
    x[::2] = 0
    weight[5::7] = 0


def outlying_inputs(x: torch.Tensor, weight: torch.Tensor) -> None:
    x[:, [3, 77]] *= 3e3


def outlying_inputs_without_weights(x: torch.Tensor, weight: torch.Tensor) -> None:
    """The other inputs are left with few of the 16 bits that logits are computed with."""
    x[:, 3] = 3e4
    weight[:, :GROUP] = 0


def single_inputs(x: torch.Tensor, weight: torch.Tensor) -> None:
    kept = torch.eye(x.shape[1]).repeat(-(-len(x) // x.shape[1]), 1)[: len(x)]
    x *= kept.to(x.dtype)


def outlying_weights(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Each row has its coarse group, and the inputs lie in one group: what is usual for a panel says little
    about a row."""
    num_groups = weight.shape[1] // GROUP
    rows = torch.arange(len(weight))
    weight[rows % num_groups == 3, 3 * GROUP : 4 * GROUP] *= 2
    weight[rows, rows % num_groups * GROUP] = 4.0
    x.view(len(x), num_groups, GROUP)[:, torch.arange(num_groups) != 3] = 0
    x[:, 3 * GROUP] = 0


def constant_rows(x: torch.Tensor, weight: torch.Tensor) -> None:
    """One value a row, not a float16: the sketch's errors of a row all have the same sign, as the inputs
    do."""
    weight[:] = (weight[:, :1].float().abs() * 0.001 + 0.3).to(weight.dtype)
    x[:] = x.abs()


def three_levels(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Zero lies between two of the 16 steps; inputs of one sign add such errors up."""
    weight[:] = weight.sign() * (weight.abs() > 0.05) * 1.2
    x[:] = x.abs()


def inputs_between_steps(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Nearly all 8-bit inputs are off by half a step towards zero, and token 40 has weights of their signs,
    so that these errors add up; token 5 has its logit, a little lower, of inputs without errors."""
    signs = x[0].sign()
    x[:] = signs * 65 / 128  # 64.49 of 127 steps
    weight.zero_()
    weight[40] = signs
    x[:, ::GROUP], weight[40, ::GROUP] = 1, 1
    weight[5, ::GROUP] = 133 / 8
    weight[5, :: 2 * GROUP] = 134 / 8


def zeros_at_the_largest_inputs(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Without a dither, zero between levels is the only weight that 4 bits round, by 8.6 standard deviations
    in all."""
    signs = x[0].sign()
    x[:], x[:, ::GROUP] = signs * 251 / 512, 1
    weight.zero_()
    weight[40], weight[40, ::GROUP] = signs, 0


def inputs_lost_beside_an_outlier(x: torch.Tensor, weight: torch.Tensor) -> None:
    """All but one are zeros in 16 bits but not in 8: the logits are all zero, the sketch's are not."""
    x[:], x[:, 3] = 0.4 / 32767, 1
    weight[:], weight[:, :GROUP], weight[40] = -0.01, 0, 0


def tiny_inputs(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Their squares are beyond float32."""
    x *= torch.tensor([1e-10, 1e-18, 1e-24, 1e-34, 1e-39]).repeat(len(x))[: len(x), None].to(x.dtype)


def huge_inputs(x: torch.Tensor, weight: torch.Tensor) -> None:
    x *= torch.tensor([1e9, 1e18, 1e24, 1e34]).repeat(len(x))[: len(x), None].to(x.dtype)


def tiny_weights(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Some below what float16 scales hold."""
    weight *= 1e-6
    weight[::2] *= 1e-2


def huge_weights(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Beyond what float16 scales of the sketch hold, but not those of 8 bits."""
    weight[::5] *= 1e6


def of_five_bits(x: torch.Tensor, weight: torch.Tensor) -> None:
    out_features, in_features = weight.shape
    weight[:] = q5_0(out_features, in_features, weight.dtype)


ADVERSARIES = [
    flat,
    repeated,
    all_equal,
    zeros,
    outlying_inputs,
    outlying_inputs_without_weights,
    single_inputs,
    outlying_weights,
    constant_rows,
    three_levels,
    inputs_between_steps,
    zeros_at_the_largest_inputs,
    inputs_lost_beside_an_outlier,
    tiny_inputs,
    huge_inputs,
    tiny_weights,
    huge_weights,
    of_five_bits,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", ADVERSARIES, ids=lambda change: str(change.__name__))
def test_odd_heads_and_odd_inputs_do_not_lead_astray(
    change: Callable[[torch.Tensor, torch.Tensor], None], dtype: torch.dtype
) -> None:
    ops = cpu_ops(dtype, "int8")
    x, weight = random_case(61, 1003, 640, dtype, seed=1)
    change(x, weight)
    assert_as_the_logits_say(ops, x, weight)
    assert_as_the_logits_say(ops, x[:1], weight)


@pytest.mark.parametrize("sign", [1, -1])
def test_what_the_errors_of_a_group_have_in_common_adds_up(sign: int) -> None:
    """A group's outlier, which meets no input, sets what float16 leaves of the middle: an error that all
    other weights have."""
    ops = cpu_ops(torch.float32, "int8")
    size, in_features = panel_features(ops), 1152
    x = torch.ones(1, in_features)
    x[:, ::GROUP], x[:, :GROUP] = 0, 0.1
    for outlier in torch.linspace(0.94, 1.4, 20).tolist():
        weight = torch.zeros(2 * size, in_features)
        weight[3, :GROUP], weight[size + 3, :GROUP] = 1.0, 1.003
        weight[size + 3, GROUP::GROUP] = outlier * sign
        assert_as_the_logits_say(ops, x, weight)


DEVIATIONS = 8.0  # of cpp/greedy.cpp, where the bound is derived
GOLDEN = 0x9E3779B97F4A7C15  # between the states of splitmix64


@dataclass(frozen=True, slots=True)
class SketchErrors:
    """What logits [r, V] have beyond the sketch's, by the derivation in cpp/greedy.cpp."""

    sketched: torch.Tensor  # float64, as all others
    statistical: torch.Tensor  # the sum of (e - m) y
    deviation: torch.Tensor  # its standard deviation
    limits: torch.Tensor  # what the other two sums come to at most


def sketch_errors(ops: CpuOps, x: torch.Tensor, head: PackedWeight) -> SketchErrors:
    assert head.sketch is not None
    identity = torch.eye(head.in_features)
    weight = in_groups(ops.logits(identity, head).T.double().contiguous())
    sketch = in_groups(sketch_weight(ops, head))
    exact = in_groups(rounded(x, 32767).double())
    inputs = rounded(in_groups(x), 127).double()
    errors = weight - sketch
    common = errors.mean(dim=2, keepdim=True)
    step = in_groups(x).abs().amax(dim=2) / 127
    rounding = 54 * (step.shape[1] + 1) * 2.0**-24
    off = (exact - inputs).norm(dim=2) + step / 7 + rounding * exact.norm(dim=2)
    return SketchErrors(
        torch.einsum("rgi,vgi->rv", inputs, sketch),
        torch.einsum("rgi,vgi->rv", inputs, errors - common),
        (inputs.square().sum(2) @ (errors - common).square().mean(2).T).sqrt(),
        inputs.sum(2).abs() @ common[:, :, 0].abs().T + off @ weight.norm(dim=2).T,
    )


def in_groups(x: torch.Tensor) -> torch.Tensor:
    """[n, k] -> [n, k / GROUP, GROUP]."""
    return x.view(len(x), -1, GROUP)


def sketch_weight(ops: CpuOps, head: PackedWeight) -> torch.Tensor:
    """float64 [V, k]: scale * (u + dither - centre) + middle."""
    assert head.sketch is not None
    sketch, size, num_groups = head.sketch.weight, panel_features(ops), head.in_features // GROUP
    first_panel = int(sketch.data[:8].view(torch.int64))
    groups = sketch.data[first_panel:].view(-1, num_groups, 16 * size + 4 * size)
    scales = groups[:, :, 16 * size : 18 * size].contiguous().view(torch.float16)  # before the middles
    scales = scales.double().transpose(1, 2).reshape(-1, num_groups)[: head.out_features]
    places = np.arange(head.in_features, dtype=np.uint64) * np.uint64(GOLDEN)
    dither = torch.from_numpy(uniforms(places, np.zeros(len(places), np.int64))) - 0.5
    undithered = ops.logits(torch.eye(head.in_features), sketch).T.double()
    return undithered + scales.repeat_interleave(GROUP, 1) * dither


def rounded(x: torch.Tensor, steps: int) -> torch.Tensor:
    """The values of the last axis in steps of the largest one's share."""
    largest = x.abs().amax(dim=-1, keepdim=True).clamp_(min=1e-30)
    return (x * (steps / largest)).round() * (largest / steps)


def room_of_panel(ops: CpuOps, x: torch.Tensor, weight: torch.Tensor) -> float:
    """How far above the largest of the sketch's logits of one panel the bound lies that the kernel computes.

    ``x`` [1, k] has a one and zeros in the first group, where ``weight`` [panel_features, k] is zero. A rival
    in another panel, whose logit is exact in the sketch, is raised above the panel's logits until the panel
    is not computed any more.
    """
    size = panel_features(ops)
    low = ops.logits(x, pack(ops, weight)).max().item()
    high = low + 10
    for _ in range(24):
        rival = (low + high) / 2
        both = torch.cat((torch.zeros_like(weight), weight))
        both[0, 0] = rival
        head = pack(ops, both)
        is_computed = greedy(ops, x, head)[1] == 3  # the most promising panel counts twice
        low, high = (rival, high) if is_computed else (low, rival)
    largest = sketch_errors(ops, x, head).sketched[0, size:].max()
    return ops.logits(x, head)[0, 0].item() - largest.item()


def room_case(ops: CpuOps, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = random_case(1, panel_features(ops), 640, torch.float32, seed)
    x[:, 0], x[:, 1:GROUP], weight[:, :GROUP] = 1, 0, 0
    return x, weight


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_is_eight_standard_deviations_above_the_sketch(seed: int) -> None:
    ops = cpu_ops(torch.float32, "int8")
    x, weight = room_case(ops, seed)
    weight[:] = weight[0] * (weight[0] @ x[0]).sign()  # a logit above zero, as the rival's
    errors = sketch_errors(ops, x, pack(ops, weight))
    room = room_of_panel(ops, x, weight) - errors.limits[0, 0].item()
    assert room / errors.deviation[0, 0].item() == pytest.approx(DEVIATIONS, abs=0.1)


@pytest.mark.parametrize("group", [1, 3, 19])
def test_features_unlike_their_panel_have_eight_over_the_root_of_two(group: int) -> None:
    """Every feature has a coarse group of its own, and the inputs lie in one group."""
    ops = cpu_ops(torch.float32, "int8")
    x, weight = room_case(ops, seed=group)
    rows = torch.arange(len(weight))
    weight[rows, (1 + rows % 19) * GROUP + 1] = 4.0
    kept = x[:, group * GROUP : (group + 1) * GROUP].clone()
    x[:, 1:] = 0
    x[:, group * GROUP : (group + 1) * GROUP] = kept
    errors = sketch_errors(ops, x, pack(ops, weight))
    room = room_of_panel(ops, x, weight) - errors.limits.max().item()
    assert room / errors.deviation.max().item() >= DEVIATIONS / 2**0.5 - 0.1


def heavy_tails(x: torch.Tensor, weight: torch.Tensor) -> None:
    x *= x.square()
    weight *= weight.abs() * 20


def of_one_sign(x: torch.Tensor, weight: torch.Tensor) -> None:
    x.abs_()
    weight.abs_()


def uniform(x: torch.Tensor, weight: torch.Tensor) -> None:
    x.copy_(torch.rand_like(x) - 0.5)
    weight.copy_(torch.rand_like(weight) - 0.5)


def likely(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Inputs that are the weights of tokens, as those of a network that is sure are."""
    x[:] = weight[: len(x)] * 20 + x * 0.3


def untouched(x: torch.Tensor, weight: torch.Tensor) -> None:
    pass


@pytest.mark.parametrize(
    "change",
    [untouched, heavy_tails, of_one_sign, uniform, likely, *ADVERSARIES],
    ids=lambda change: str(change.__name__),
)
def test_errors_of_the_sketch_stay_far_within_eight_standard_deviations(
    change: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Of 122,183 normal variables the largest is 4.4 on average, and above 6 once in four thousand times."""
    ops = cpu_ops(torch.float32, "int8")
    x, weight = random_case(61, 2003, 640, torch.float32, seed=3)
    change(x, weight)
    head = pack(ops, weight)
    errors = sketch_errors(ops, x, head)
    beyond = (ops.logits(x, head) - errors.sketched - errors.statistical).abs()
    is_known = torch.isfinite(errors.sketched)  # else float16 holds no such steps, and nothing is bounded
    assert bool((beyond <= errors.limits)[is_known].all())
    in_deviations = errors.statistical[errors.deviation > 0] / errors.deviation[errors.deviation > 0]
    assert bool((errors.statistical[errors.deviation == 0] == 0).all())
    if len(in_deviations):
        assert in_deviations.abs().max() < 6
        assert in_deviations.std() < 1.05


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_clear_winner_costs_a_few_panels_wherever_it_stands(dtype: torch.dtype) -> None:
    ops = cpu_ops(dtype, "int8")
    size = panel_features(ops)
    num_tokens = 100 * size + 1
    x, weight = random_case(1, num_tokens, 640, dtype)
    for winner in (0, size - 1, size, 1234, num_tokens - 2, num_tokens - 1):
        peaked = weight.clone()
        peaked[winner] = x[0] * 0.05
        token_ids, num_panels = greedy(ops, x, pack(ops, peaked))
        assert token_ids.tolist() == [winner]
        assert num_panels <= 3
        # the worst of all, beside features that are not there
        token_ids, _ = greedy(ops, -x, pack(ops, peaked[winner:]))
        assert token_ids[0] != 0 or winner == num_tokens - 1


def test_what_fills_the_last_panel_never_wins() -> None:
    ops = cpu_ops(torch.float32, "int8")
    x, weight = random_case(5, 16 * 5 + 3, 64, torch.float32)
    x, weight = x.abs(), -weight.abs() - 0.01  # zeros would beat every logit
    assert_as_the_logits_say(ops, x, weight)
    assert_as_the_logits_say(ops, x, weight[-3:].contiguous())


def test_the_number_of_threads_changes_nothing() -> None:
    ops = cpu_ops(torch.float32, "int8")
    x, weight = random_case(13, 3001, 320, torch.float32)
    repeated(x, weight)
    head = pack(ops, weight)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            results.append(greedy(ops, x, head)[0].tolist())
            results.append([greedy(ops, row[None], head)[0].item() for row in x])
    finally:
        torch.set_num_threads(before)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_shows_and_stays_alone(poison: float, dtype: torch.dtype) -> None:
    ops = cpu_ops(dtype, "int8")
    x, weight = random_case(9, 500, 96, dtype)
    head = pack(ops, weight)
    expected = greedy(ops, x, head)[0]
    x[[0, 4], 17] = poison
    expected[[0, 4]] = -1
    assert greedy(ops, x, head)[0].tolist() == expected.tolist()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_shows(poison: float) -> None:
    ops = cpu_ops(torch.float32, "int8")
    x, weight = random_case(9, 500, 96, torch.float32)
    weight[333, 50] = poison
    assert greedy(ops, x, pack(ops, weight))[0].tolist() == [-1] * 9


def test_there_is_a_sketch_of_int8_heads_only() -> None:
    x, weight = random_case(3, 70, 48, torch.float32)
    for ops, in_features in ((cpu_ops(torch.float32), 32), (cpu_ops(torch.float32, "int8"), 48)):
        head = ops.pack_linear(weight[:, :in_features].contiguous(), "head")
        assert ops.greedy(x[:, :in_features], head) is None
    assert cpu_ops(torch.float32, "int8").pack_linear(weight[:, :32], "down").sketch is None  # type: ignore[attr-defined]


def test_the_sketch_survives_the_packed_form() -> None:
    ops = cpu_ops(torch.float32, "int8")
    x, weight = random_case(5, 1003, 96, torch.float32)
    head = pack(ops, weight)
    form = take_apart(head)
    again = put_together(form)
    assert again.sketch is not None
    assert again.nbytes == head.nbytes == sum(tensor.nbytes for tensor in form.tensors.values())
    assert (
        greedy(ops, x, again)[0].tolist()
        == greedy(ops, x, head)[0].tolist()
        == ops.argmax(ops.logits(x, head)).tolist()
    )
    assert greedy(ops, x, again)[1] == greedy(ops, x, head)[1]
