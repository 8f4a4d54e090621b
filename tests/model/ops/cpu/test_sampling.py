"""Sampling kernels equal the reference, ties and masks included, and rows do not influence each other."""

import pytest
import torch

from tests.model.ops.cpu.harness import cpu_ops, every_instruction_set, reference_ops

pytestmark = every_instruction_set

SIZES = [1, 2, 7, 33, 1000, 1024, 1025, 32768, 40000, 262144]


def logits_of(rows: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("size", SIZES)
def test_all_finite_finds_every_kind_of_poison_anywhere(size: int) -> None:
    logits = logits_of(4, size)
    logits[0, size // 2] = torch.nan
    logits[1, size - 1] = torch.inf
    logits[2, 0] = -torch.inf
    assert cpu_ops(torch.float32).all_finite(logits).tolist() == [False, False, False, True]


@pytest.mark.parametrize("size", SIZES)
def test_argmax_takes_the_lowest_id_among_equals(size: int) -> None:
    ops = cpu_ops(torch.float32)
    logits = logits_of(5, size)
    assert torch.equal(ops.argmax(logits), logits.argmax(-1))
    best = sorted({size - 1, size // 2, size // 3})
    logits[:, best] = 100.0
    assert ops.argmax(logits).tolist() == [best[0]] * 5
    logits[:] = -torch.inf
    logits[:, size - 1] = -5.0
    assert ops.argmax(logits).tolist() == [size - 1] * 5


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.999, 1.0])
def test_masks_leave_exactly_their_tokens_of_their_rows(size: int, share: float) -> None:
    generator = torch.Generator().manual_seed(size)
    rows = torch.tensor([3, 0])
    # bits beyond the last token mean nothing
    allowed = torch.rand(2, -(-size // 8) * 8, generator=generator) < share
    masks = (allowed.view(2, -1, 8) * (1 << torch.arange(8))).sum(-1).to(torch.uint8)
    logits = logits_of(5, size)
    expected = logits.clone()
    expected[rows] = expected[rows].masked_fill(~allowed[:, :size], -torch.inf)
    for ops in (cpu_ops(torch.float32), reference_ops(torch.float32)):
        masked = logits.clone()
        ops.mask_rows(masked, rows, masks)
        assert torch.equal(masked, expected)
    apart = torch.stack([logits, logits], dim=-1)[..., 0]  # not contiguous
    cpu_ops(torch.float32).mask_rows(apart, rows, masks)
    assert torch.equal(apart, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["random", "rounded", "ascending", "masked", "constant"])
def test_top_candidates_equal_the_reference(size: int, kind: str) -> None:
    logits = logits_of(3, size, seed=size)
    if kind == "rounded":
        logits = logits.round()  # many ties, at the border of the k too
    elif kind == "ascending":
        logits = logits.sort(-1).values
    elif kind == "masked":
        logits[:, torch.arange(size) % 50 != size % 50 - 1] = -torch.inf
        logits[:, size - 1] = 1.0
    elif kind == "constant":
        logits[:] = 2.5
    temperature = torch.tensor([1.0, 0.01, 30.0])
    for k in sorted({1, min(2, size), min(64, size), min(1000, size), size // 10 + 1, size}):
        ours = cpu_ops(torch.float32).top_candidates(logits, k, temperature)
        theirs = reference_ops(torch.float32).top_candidates(logits, k, temperature)
        assert torch.equal(ours.values, theirs.values)
        assert torch.equal(ours.token_ids, theirs.token_ids)
        exact = (
            ((logits.double() - logits.double().amax(-1, keepdim=True)) / temperature.double()[:, None])
            .exp()
            .sum(-1)
            .log()
        )
        # A unit in the last place of each exponential; at a temperature of 0.01, of arguments up to 1,000
        # times as large.
        torch.testing.assert_close(ours.log_total.double(), exact, rtol=2e-6, atol=2e-6)


def test_rows_and_threads_change_no_bit() -> None:
    ops = cpu_ops(torch.float32)
    logits, temperature = logits_of(6, 70000), torch.linspace(0.2, 2.0, 6)
    uniform = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    min_p, top_p = torch.zeros(6), torch.tensor([1.0, 0.9, 0.5, 0.99, 1.0, 0.0], dtype=torch.float64)
    whole, drawn = (
        ops.top_candidates(logits, 64, temperature),
        ops.draw(logits, temperature, top_p, min_p, uniform),
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for row in range(6):
            one = slice(row, row + 1)
            alone = ops.top_candidates(logits[one], 64, temperature[one])
            assert all(torch.equal(a, b[one]) for a, b in zip(alone, whole, strict=True))
            alone_drawn = ops.draw(logits[one], temperature[one], top_p[one], min_p[one], uniform[one])
            assert torch.equal(alone_drawn, drawn[one])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cut", [0.0, 0.05, 1.0])
def test_draw_inverts_the_cumulative_distribution(size: int, cut: float) -> None:
    rows = 24
    logits = logits_of(rows, size, seed=7)
    logits[:, ::3] = -torch.inf
    logits[:, size - 1] = 0.5
    temperature = torch.linspace(0.3, 3.0, rows)
    min_p = torch.full((rows,), cut)
    uniform = torch.linspace(0, 1, rows + 1, dtype=torch.float64)[:-1]
    uniform[-1] = 1.0 - 2.0**-53
    drawn = cpu_ops(torch.float32).draw(
        logits, temperature, torch.ones(rows, dtype=torch.float64), min_p, uniform
    )
    weights = (
        (logits.double() - logits.double().amax(-1, keepdim=True)) / temperature.double()[:, None]
    ).exp()
    kept = weights.where(weights >= cut * (1 - 1e-5), 0.0)
    cumulative = kept.cumsum(-1) / kept.sum(-1, keepdim=True)
    chosen = drawn[:, None]
    assert (kept.gather(1, chosen) > 0).all()
    # float32 exponentials and sums of blocks: the borders between tokens are off by a few 2^-24 of the whole.
    through = cumulative.gather(1, chosen)[:, 0]
    before = through - (kept / kept.sum(-1, keepdim=True)).gather(1, chosen)[:, 0]
    slack = 1e-5 if cut else 3e-6
    assert (before - slack <= uniform).all()
    assert (uniform <= through + slack).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 8.0])
def test_top_p_keeps_what_sorting_would_keep(size: int, scale: float) -> None:
    """Flat, real and peaked rows, values shared by many tokens among them; draws all over the
    distribution."""
    rows = 40
    logits = (logits_of(rows, size, seed=5) * scale).round(decimals=2)
    logits[:, ::5] = -torch.inf
    logits[:, size - 1] = 0.0
    temperature = torch.linspace(0.5, 2.0, rows)
    top_p = torch.linspace(0.0, 1.0, rows, dtype=torch.float64)
    min_p = torch.tensor([0.0, 0.3]).repeat(rows // 2)
    for uniform in (0.0, 0.3, 0.77, 1.0 - 2.0**-53):
        drawn = cpu_ops(torch.float32).draw(
            logits, temperature, top_p, min_p, torch.full((rows,), uniform, dtype=torch.float64)
        )
        weights = (
            (logits.double() - logits.double().amax(-1, keepdim=True)) / temperature.double()[:, None]
        ).exp()
        sorted_weights, order = weights.sort(dim=-1, descending=True, stable=True)
        mass = sorted_weights.cumsum(-1) / sorted_weights.sum(-1, keepdim=True)
        before = mass - sorted_weights / sorted_weights.sum(-1, keepdim=True)
        place = (order == drawn[:, None]).int().argmax(-1, keepdim=True)
        # Sums of float32 exponentials: the border of the kept tokens is off by a few 2^-24 of the whole.
        assert ((before.gather(1, place)[:, 0] < top_p + 3e-6) | (place[:, 0] == 0)).all()
        assert (weights.gather(1, drawn[:, None])[:, 0] >= min_p * (1 - 1e-5)).all()
        if uniform > 0.9:  # the last kept token in order of id: nothing likelier that is kept has a higher id
            kept = (
                (before < top_p[:, None] - 3e-6)
                & (sorted_weights > min_p[:, None] * (1 + 1e-5))
                & (sorted_weights > 0)
            )
            last = order.masked_fill(~kept, -1).amax(-1)
            assert (drawn >= last).all()


def test_a_draw_at_min_p_one_is_the_likeliest_token() -> None:
    logits = logits_of(9, 5000)
    uniform = torch.linspace(0, 0.999, 9, dtype=torch.float64)
    drawn = cpu_ops(torch.float32).draw(
        logits, torch.ones(9), torch.ones(9, dtype=torch.float64), torch.ones(9), uniform
    )
    assert torch.equal(drawn, logits.argmax(-1))


def test_no_rows() -> None:
    ops = cpu_ops(torch.float32)
    empty = torch.empty(0, 100)
    assert ops.all_finite(empty).shape == (0,)
    assert ops.argmax(empty).shape == (0,)
    assert ops.top_candidates(empty, 5, torch.empty(0)).values.shape == (0, 5)
    none, wide = torch.empty(0), torch.empty(0, dtype=torch.float64)
    assert ops.draw(empty, none, wide, none, wide).shape == (0,)


def test_nan_rows_do_not_crash_or_reach_other_rows() -> None:
    ops = cpu_ops(torch.float32)
    logits = logits_of(3, 5000)
    clean = ops.top_candidates(logits[[0, 2]], 64, torch.ones(2))
    logits[1] = torch.nan
    dirty = ops.top_candidates(logits, 64, torch.ones(3))
    assert torch.equal(dirty.token_ids[[0, 2]], clean.token_ids)
    half = torch.full((3,), 0.5, dtype=torch.float64)
    drawn = ops.draw(logits, torch.ones(3), half, torch.zeros(3), half)
    assert ((drawn >= 0) & (drawn < 5000)).all()
    assert ((ops.argmax(logits) >= 0) & (ops.argmax(logits) < 5000)).all()
