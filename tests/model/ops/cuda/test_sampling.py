"""Sampling kernels equal the reference, ties and masks included, and rows do not influence each other."""

import pytest
import torch

from model.ops.cuda.triton import sampling
from tests.model.ops.cuda.harness import DEVICE, cuda_ops, on_device, randn, reference_ops

pytestmark = on_device

SIZES = [1, 1000, 4096, 5000]
VOCABULARY = 262144
ON_GPU = DEVICE.type == "cuda"  # and not under the interpreter, which takes seconds for each of these
REFERENCE = reference_ops(torch.float32)


@pytest.fixture
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a small block as for a large one."""
    if not ON_GPU:
        monkeypatch.setattr(sampling, "BLOCK", 131072)


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    return (
        cuda_ops(torch.float32)
        .draw(*(tensor.to(DEVICE) for tensor in (logits, temperature, top_p, min_p, uniform)))
        .cpu()
    )


@pytest.mark.parametrize("size", SIZES)
def test_all_finite_finds_every_kind_of_poison_anywhere(size: int) -> None:
    logits = randn(4, size)
    logits[0, size // 2] = torch.nan
    logits[1, size - 1] = torch.inf
    logits[2, 0] = -torch.inf
    assert cuda_ops(torch.float32).all_finite(logits.to(DEVICE)).tolist() == [False, False, False, True]


@pytest.mark.parametrize("size", [*SIZES, VOCABULARY])
@pytest.mark.usefixtures("large_blocks")
def test_argmax_takes_the_lowest_id_among_equals(size: int) -> None:
    logits = randn(3, size)
    best = sorted({size - 1, size // 2, size // 3})
    logits[1, best] = 100.0
    logits[2] = -torch.inf
    logits[2, size - 1] = -5.0
    assert cuda_ops(torch.float32).argmax(logits.to(DEVICE)).tolist() == [
        int(logits[0].argmax()),
        best[0],
        size - 1,
    ]


@pytest.mark.parametrize(
    ("size", "k"), [(7, 7), (5000, 500), *([(7, 3), (4096, 64), (VOCABULARY, 64)] if ON_GPU else [])]
)
def test_top_candidates_equal_the_reference(size: int, k: int) -> None:
    """Rows: plain, full of ties at the border of the k too, both zeros among them; nearly all masked; all the
    same."""
    logits = randn(4, size, seed=size) * 4
    logits[1] = logits[1].round()
    logits[2, torch.arange(size) % 50 != size % 50 - 1] = -torch.inf
    logits[2, size - 1] = 1.0
    logits[3] = 2.5
    temperature = torch.tensor([1.0, 0.01, 30.0, 1.0])
    ours = cuda_ops(torch.float32).top_candidates(logits.to(DEVICE), k, temperature.to(DEVICE))
    theirs = REFERENCE.top_candidates(logits, k, temperature)
    assert torch.equal(ours.values.cpu(), theirs.values)
    assert torch.equal(ours.token_ids.cpu(), theirs.token_ids)
    exact = (
        ((logits.double() - logits.double().amax(-1, keepdim=True)) / temperature.double()[:, None])
        .exp()
        .sum(-1)
        .log()
    )
    # A unit in the last place of each exponential; at a temperature of 0.01, of arguments up to 1,000 times
    # as large.
    torch.testing.assert_close(ours.log_total.cpu().double(), exact, rtol=2e-6, atol=2e-6)


def inside_what_is_kept(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    drawn: torch.Tensor,
) -> None:
    """By sorting, in float64. The kernels' masses are float32 exponentials: a border may be off by a few
    2^-24 of the whole."""
    weights = (
        (logits.double() - logits.double().amax(-1, keepdim=True)) / temperature.double()[:, None]
    ).exp()
    sorted_weights, order = weights.sort(dim=-1, descending=True, stable=True)
    share = sorted_weights / sorted_weights.sum(-1, keepdim=True)
    before = share.cumsum(-1) - share
    chosen = drawn[:, None]
    place = (order == chosen).int().argmax(-1, keepdim=True)
    assert ((before.gather(1, place)[:, 0] < top_p + 3e-6) | (place[:, 0] == 0)).all()
    assert (weights.gather(1, chosen)[:, 0] >= min_p * (1 - 1e-5)).all()
    assert (weights.gather(1, chosen) > 0).all()
    # Where in order of id the token stands among those surely kept, and among those perhaps kept.
    sure = (before < top_p[:, None] - 3e-6) & (sorted_weights > min_p[:, None] * (1 + 1e-5))
    sure[:, 0] = True
    perhaps = (before < top_p[:, None] + 3e-6) & (sorted_weights >= min_p[:, None] * (1 - 1e-5))
    for kept, sign in ((sure, 1), (perhaps, -1)):
        mass = torch.zeros_like(weights).scatter(1, order, sorted_weights * kept)
        through = (mass.cumsum(-1) / mass.sum(-1, keepdim=True)).gather(1, chosen)[:, 0]
        of_it = (mass / mass.sum(-1, keepdim=True)).gather(1, chosen)[:, 0]
        certain = (sure == perhaps).all(-1)  # else the borders move by a whole token
        if sign > 0:
            assert ((uniform <= through + 1e-5) | ~certain).all()
        else:
            assert ((through - of_it - 1e-5 <= uniform) | ~certain).all()


@pytest.mark.parametrize("size", [5000, *([7] if ON_GPU else [])])
def test_draw_inverts_the_cumulative_distribution_of_what_is_kept(size: int) -> None:
    """Peaked to flat rows with masks and, by rounding, values that many tokens share; all kinds of cuts and
    draws."""
    rows = 8
    generator = torch.Generator().manual_seed(size)
    logits = (randn(rows, size, seed=7) * torch.linspace(0, 8, rows)[:, None]).round(decimals=1)
    logits[:, ::3] = -torch.inf
    logits[:, size - 1] = 0.5
    temperature = torch.linspace(0.3, 3.0, rows)
    top_p = torch.rand(rows, dtype=torch.float64, generator=generator)
    top_p[:5] = torch.tensor([1.0, 0.0, 0.999, 1e-12, 1.0])
    min_p = torch.tensor([0.0, 0.05, 0.0, 1.0]).repeat(rows // 4)
    uniform = torch.rand(rows, dtype=torch.float64, generator=generator)
    uniform[[3, 6]] = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    drawn = draw(logits, temperature, top_p, min_p, uniform)
    inside_what_is_kept(logits, temperature, top_p, min_p, uniform, drawn)


@pytest.mark.usefixtures("large_blocks")
def test_draws_from_the_whole_vocabulary() -> None:
    logits = randn(1, VOCABULARY, seed=1).mul(4).round(decimals=1)
    settings = (torch.tensor([0.8]), torch.tensor([0.9], dtype=torch.float64), torch.tensor([1e-4]))
    uniform = torch.tensor([0.77], dtype=torch.float64)
    inside_what_is_kept(logits, *settings, uniform, draw(logits, *settings, uniform))


def test_ties_at_the_border_of_top_p_are_kept_in_order_of_id() -> None:
    """Ten equal tokens, and a top_p that six of them reach: the draws are spread over the first six."""
    logits = torch.full((4, 30), -torch.inf)
    logits[:, 2:30:3] = 1.5  # 2, 5, ..., 29
    uniform = torch.tensor([0.0, 0.4, 0.6, 0.99], dtype=torch.float64)
    drawn = draw(logits, torch.ones(4), torch.full((4,), 0.58, dtype=torch.float64), torch.zeros(4), uniform)
    assert drawn.tolist() == [2, 8, 11, 17]


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    logits, temperature = randn(2, 5000 if ON_GPU else 1000) * 4, torch.tensor([0.2, 1.0])
    uniform = torch.tensor([0.1, 0.5], dtype=torch.float64)
    min_p, top_p = torch.zeros(2), torch.tensor([1.0, 0.9], dtype=torch.float64)
    whole = cuda_ops(torch.float32).top_candidates(logits.to(DEVICE), 8, temperature.to(DEVICE))
    drawn = draw(logits, temperature, top_p, min_p, uniform)
    one = slice(1, 2)
    alone = cuda_ops(torch.float32).top_candidates(logits[one].to(DEVICE), 8, temperature[one].to(DEVICE))
    assert all(torch.equal(a, b[one]) for a, b in zip(alone, whole, strict=True))
    assert torch.equal(draw(logits[one], temperature[one], top_p[one], min_p[one], uniform[one]), drawn[one])


def test_no_rows() -> None:
    empty, none = torch.empty(0, 100, device=DEVICE), torch.empty(0, device=DEVICE)
    wide = none.double()
    assert cuda_ops(torch.float32).all_finite(empty).shape == (0,)
    assert cuda_ops(torch.float32).argmax(empty).shape == (0,)
    assert cuda_ops(torch.float32).top_candidates(empty, 5, none).values.shape == (0, 5)
    assert cuda_ops(torch.float32).draw(empty, none, wide, none, wide).shape == (0,)


def test_nan_rows_do_not_crash_or_reach_other_rows() -> None:
    logits = randn(2, 1000) * 4
    ones, half = torch.ones(2), torch.full((2,), 0.5, dtype=torch.float64)
    clean = REFERENCE.top_candidates(logits, 16, ones)
    logits[0] = torch.nan
    dirty = cuda_ops(torch.float32).top_candidates(logits.to(DEVICE), 16, ones.to(DEVICE))
    assert torch.equal(dirty.token_ids[1].cpu(), clean.token_ids[1])
    for token_ids in (
        draw(logits, ones, half, torch.zeros(2), half),
        cuda_ops(torch.float32).argmax(logits.to(DEVICE)),
        dirty.token_ids,
    ):
        assert ((token_ids >= 0) & (token_ids < 1000)).all()
