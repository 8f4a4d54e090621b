"""The likeliest token without all the logits: always the one that the logits say, for heads and inputs of
every kind."""

from collections.abc import Callable

import pytest
import torch

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
