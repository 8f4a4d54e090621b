"""The sampler: what is drawn, what is reported, and that neither depends on the batch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from model.interface.grammar_state import GrammarState
from model.interface.random_streams import uniform
from model.interface.running_batch import RunningBatch
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import ChunkResult
from model.ops.reference import ReferenceOps
from model.sampling.sampler import NOTHING_LEFT, Sampler

VOCAB = 3000
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
RANDOM = SamplingParams(max_tokens=1)
SAMPLER = Sampler(ReferenceOps(torch.device("cpu"), torch.float32))


@dataclass
class Row:
    """What the sampler is told of one sequence."""

    sampling: SamplingParams
    prompt: list[int]
    output: list[int]
    grammar: GrammarState | None = None


def chunk(sampling: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None) -> Row:
    return Row(sampling, prompt or [2], output or [])


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[ChunkResult]:
    """One result per row of logits. The sequences have rows of the running batch in another order."""
    batch = RunningBatch(len(rows), 1)
    taken = {
        index: batch.add([*row.prompt, *row.output], len(row.prompt), row.sampling, grammar=row.grammar)
        for index, row in reversed(list(enumerate(rows)))
    }
    order = np.array([taken[index] for index in range(len(rows))])
    return SAMPLER.sample(logits, batch, order, np.array([len(row.output) for row in rows]))


def random_logits(rows: int = 1, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def draw(logits: torch.Tensor, sampling: SamplingParams, **more: Any) -> int:
    """One token from one row [V]."""
    result = sample(logits[None].clone(), [chunk(sampling, **more)])[0]
    assert result.error is None
    return result.token_ids[0]


def draw_many(logits: torch.Tensor, sampling: SamplingParams, count: int) -> torch.Tensor:
    """Frequencies of tokens over many seeds, from one row [V]."""
    chunks = [chunk(replace(sampling, seed=seed)) for seed in range(count)]
    results = sample(logits.expand(count, -1).contiguous(), chunks)
    drawn = torch.tensor([result.token_ids[0] for result in results])
    return torch.bincount(drawn, minlength=len(logits)) / count


RECORDED_UNIFORM = 0.1296456182997474

# -- random numbers ------------------------------------------------------------------------------------------


def test_uniform_is_fixed_by_seed_choice_and_position() -> None:
    assert uniform(7, 0, 3) == uniform(7, 0, 3)
    # Recorded: a change would break every seeded client's reproducibility.
    assert uniform(0, 0, 0) == RECORDED_UNIFORM


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1])
def test_every_integer_is_a_seed(seed: int) -> None:
    """Case 42."""
    numbers = [uniform(seed, choice, position) for choice in range(4) for position in range(4)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    logits = random_logits()[0]
    tokens = [draw(logits, replace(RANDOM, seed=seed), output=[5] * n) for n in range(16)]
    assert tokens == [draw(logits, replace(RANDOM, seed=seed), output=[5] * n) for n in range(16)]


def test_distinct_seeds_differ() -> None:
    """Case 42: 2**32 + k is not k, -1 is not 2**64 - 1, and nearby seeds, choices and positions are
    unrelated."""
    seeds = [0, 1, -1, 2**32, 2**32 + 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1]
    assert len({uniform(seed, 0, 0) for seed in seeds}) == len(seeds)
    assert uniform(1, 2, 3) != uniform(1, 3, 2)


def test_uniform_is_uniform() -> None:
    numbers = torch.tensor([uniform(seed, 0, position) for seed in range(100) for position in range(100)])
    buckets = torch.histc(numbers, bins=20, min=0, max=1)
    # 500 expected per bucket, standard deviation 22: five of them
    assert (buckets - 500).abs().max() < 110
    successive = torch.corrcoef(numbers.view(100, 100).T)
    assert (successive - torch.eye(100)).abs().max() < 0.5


# -- the draw ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1e-8, 1e-40])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """Case 40."""
    logits = random_logits(20)
    for row in logits:
        assert draw(row, replace(RANDOM, temperature=temperature, top_p=0.5, seed=3)) == int(row.argmax())


def test_small_temperatures_stay_finite_and_top_k_one_is_greedy() -> None:
    """Case 40."""
    for row in random_logits(20, scale=30.0):
        assert draw(row, replace(RANDOM, top_k=1)) == int(row.argmax())
        for params in (RANDOM, replace(RANDOM, top_p=0.9), replace(RANDOM, top_k=40)):
            assert draw(row, replace(params, temperature=1e-3)) == int(row.argmax())
            assert 0 <= draw(row, replace(params, temperature=2.0)) < VOCAB


def reference_distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution as transformers' warpers define it: temperature, top-k, top-p, min-p."""
    scores = logits.double() / params.temperature
    if params.top_k:
        scores = scores.masked_fill(
            scores < scores.topk(min(params.top_k, len(scores))).values[-1], -math.inf
        )
    if params.top_p < 1.0:
        probabilities, order = scores.softmax(0).sort(descending=True)
        removed = probabilities.cumsum(0) - probabilities >= params.top_p
        removed[0] = False
        scores = scores.index_fill(0, order[removed], -math.inf)
    if params.min_p > 0.0:
        probabilities = scores.softmax(0)
        scores = scores.masked_fill(probabilities < params.min_p * probabilities.max(), -math.inf)
    return scores.softmax(0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 5},
        {"top_p": 0.5},
        {"top_p": 0.95, "top_k": 12},
        {"top_p": 0.0},
        {"min_p": 0.2},
        {"top_k": 8, "top_p": 0.9, "min_p": 0.15, "temperature": 0.8},
        {"top_k": 1000},
    ],
)
def test_draws_follow_the_truncated_distribution(settings: dict[str, Any]) -> None:
    params = replace(RANDOM, **settings)
    logits = random_logits(vocab=40)[0]
    count = 6000
    expected = reference_distribution(logits, params)
    frequencies = draw_many(logits, params, count)
    assert not frequencies[expected == 0].any()
    # Five standard deviations of a frequency over independent draws; three draws more for the rarest tokens'
    # skewed counts.
    bound = 5 * (expected * (1 - expected) / count).sqrt() + 3 / count
    assert ((frequencies - expected).abs() <= bound).all()


def test_top_p_is_exact_where_it_keeps_most_of_the_vocabulary() -> None:
    """A flat distribution."""
    logits = random_logits(scale=0.01)[0]
    params = replace(RANDOM, top_p=0.9)
    kept = reference_distribution(logits, params) > 0
    assert kept.sum() > 2000
    frequencies = draw_many(logits, params, 3000)
    assert not frequencies[~kept].any()
    assert (frequencies > 0).sum() > 1024


def test_the_token_that_crosses_top_p_is_kept() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert set(draw_many(logits, replace(RANDOM, top_p=0.6), 400).nonzero()[:, 0].tolist()) == {0, 1}
    assert set(draw_many(logits, replace(RANDOM, top_p=0.45), 400).nonzero()[:, 0].tolist()) == {0}


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(VOCAB)
    assert draw(logits, GREEDY) == 0
    assert draw_many(logits, replace(RANDOM, top_p=2.5 / VOCAB), 200).nonzero()[:, 0].tolist() == [0, 1, 2]
    assert draw_many(logits, replace(RANDOM, top_k=3), 200).nonzero()[:, 0].tolist() == [0, 1, 2]


# -- the batch -----------------------------------------------------------------------------------------------

MIXED = [
    GREEDY,
    replace(RANDOM, seed=11),
    replace(RANDOM, seed=12, temperature=0.7, top_p=0.9, logprobs=3),
    replace(RANDOM, seed=13, top_k=50, logprobs=0),
    replace(RANDOM, seed=14, top_k=2000, min_p=0.01),
    replace(RANDOM, seed=15, top_p=0.999, temperature=1.9),
    replace(GREEDY, repetition_penalty=2.0, logprobs=5),
    replace(GREEDY, frequency_penalty=2.0, presence_penalty=-1.0),
    replace(RANDOM, seed=16, logit_bias=((7, 100.0),)),
    replace(RANDOM, seed=17, allowed_token_ids=(3, 4, 2999, 5_000_000)),
    replace(GREEDY, stop_token_ids=frozenset({1, 106}), min_tokens=9),
]


def run_mixed(order: list[int], logits: torch.Tensor) -> dict[int, ChunkResult]:
    chunks = [chunk(MIXED[i], prompt=[2, 9, 9, i + 20], output=[8, 8, i + 30]) for i in order]
    return dict(zip(order, sample(logits[order].clone(), chunks), strict=True))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Case 57 among others: settings of one request never reach another, in any order."""
    logits = random_logits(len(MIXED), scale=1.0)
    alone = {i: run_mixed([i], logits)[i] for i in range(len(MIXED))}
    for order in ([*range(len(MIXED))], [*reversed(range(len(MIXED)))], [6, 0], [0, 6], [5, 2, 3, 9]):
        assert run_mixed(order, logits) == {i: alone[i] for i in order}


def test_a_row_of_bad_logits_fails_alone() -> None:
    """Case 1: what is not finite is reported, never sampled."""
    for bad in (math.nan, math.inf, -math.inf):
        logits = random_logits(3)
        logits[1, 17] = bad
        results = sample(logits, [chunk(GREEDY), chunk(replace(RANDOM, logprobs=2)), chunk(RANDOM)])
        assert [result.error is None for result in results] == [True, False, True]
        assert results[1].token_ids == []
        assert len(results[0].token_ids) == len(results[2].token_ids) == 1


# -- edits ---------------------------------------------------------------------------------------------------


def test_presence_and_frequency_penalties_count_generated_tokens_only() -> None:
    """Case 57: with nothing generated, the first token is the unpenalised one, however often the prompt holds
    it."""
    logits = torch.zeros(VOCAB)
    logits[[10, 11, 12]] = torch.tensor([5.0, 4.0, 3.5])
    penalised = replace(GREEDY, frequency_penalty=2.0)
    assert draw(logits, penalised, prompt=[10] * 50) == 10
    assert draw(logits, penalised, prompt=[10] * 50, output=[10]) == 11
    assert draw(logits, penalised, output=[10, 11]) == 12
    assert draw(logits, replace(GREEDY, presence_penalty=1.2), output=[10, 10, 10]) == 11
    assert draw(logits, replace(GREEDY, frequency_penalty=0.3), output=[10, 10, 10]) == 10
    assert draw(logits, replace(GREEDY, frequency_penalty=0.4), output=[10, 10, 10]) == 11
    assert draw(logits, replace(GREEDY, presence_penalty=-2.0), output=[12]) == 12


def test_repetition_penalty_covers_prompt_and_generated_tokens_whatever_the_sign() -> None:
    """Case 57."""
    penalised = replace(GREEDY, repetition_penalty=2.0)
    logits = torch.full((VOCAB,), -9.0)
    logits[[10, 11, 12]] = torch.tensor([5.0, 3.0, 2.0])
    assert draw(logits, penalised, prompt=[10]) == 11
    assert draw(logits, penalised, prompt=[10], output=[11]) == 10
    negative = torch.full((VOCAB,), -9.0)
    negative[[10, 11]] = torch.tensor([-1.0, -1.5])
    assert draw(negative, penalised, output=[10]) == 11


def test_bias_and_masks() -> None:
    logits = random_logits()[0]
    best = int(logits.argmax())
    assert draw(logits, replace(GREEDY, logit_bias=((77, 100.0),))) == 77
    assert draw(logits, replace(GREEDY, logit_bias=((best, -100.0),))) == int(logits.topk(2).indices[1])
    assert draw(logits, replace(RANDOM, allowed_token_ids=(42,))) == 42
    stops = replace(GREEDY, stop_token_ids=frozenset({best}), min_tokens=2)
    assert draw(logits, stops, output=[5]) != best
    assert draw(logits, stops, output=[5, 5]) == best


def test_a_row_with_nothing_left_to_draw_is_an_error() -> None:
    impossible = replace(GREEDY, allowed_token_ids=(1,), stop_token_ids=frozenset({1}), min_tokens=1)
    results = sample(random_logits(2), [chunk(impossible), chunk(GREEDY)])
    assert results[0].error == NOTHING_LEFT
    assert results[0].token_ids == []
    assert len(results[1].token_ids) == 1


# -- log-probabilities ---------------------------------------------------------------------------------------


def test_logprobs_are_raw_and_the_chosen_value_is_bit_equal_to_its_entry() -> None:
    logits = random_logits(1, scale=1.0)
    expected = logits[0].double().log_softmax(0)
    edits: dict[str, Any] = {
        "temperature": 0.3,
        "top_k": 20,
        "logit_bias": ((5, 3.0),),
        "repetition_penalty": 1.5,
        "frequency_penalty": 1.0,
    }
    found = 0
    for seed in range(30):
        params = replace(RANDOM, seed=seed, logprobs=20, **edits)
        result = sample(logits, [chunk(params, output=[7])])[0]
        (entry,) = result.logprobs
        assert entry.token_id == result.token_ids[0]
        assert entry.logprob == pytest.approx(expected[entry.token_id].item(), abs=1e-5)
        assert [token_id for token_id, _ in entry.top] == expected.topk(20).indices.tolist()
        for token_id, value in entry.top:
            assert value == pytest.approx(expected[token_id].item(), abs=1e-5)
            if token_id == entry.token_id:
                found += 1
                assert value == entry.logprob
    assert found > 10


def test_logprobs_zero_reports_the_sampled_token_alone() -> None:
    result = sample(
        random_logits(2), [chunk(replace(RANDOM, logprobs=0)), chunk(replace(RANDOM, logprobs=4))]
    )
    assert result[0].logprobs[0].top == []
    assert len(result[1].logprobs[0].top) == 4
    assert sample(random_logits(1), [chunk(RANDOM)])[0].logprobs == []


def test_labels_take_the_place_of_the_likeliest_bit_for_bit() -> None:
    logits = random_logits(3)
    labels = (2999, 0, 17)
    params = replace(RANDOM, seed=4, logprobs=20)
    plain = sample(logits, [chunk(params)] * 3)
    mixed = sample(logits, [chunk(params), chunk(replace(params, logprob_token_ids=labels)), chunk(params)])
    assert [result.token_ids for result in mixed] == [result.token_ids for result in plain]
    assert [mixed[0].logprobs, mixed[2].logprobs] == [plain[0].logprobs, plain[2].logprobs]
    (entry,) = mixed[1].logprobs
    assert entry.logprob == plain[1].logprobs[0].logprob
    assert [token_id for token_id, _ in entry.top] == list(labels)
    expected = logits[1].double().log_softmax(dim=-1)
    # Sums of 3000 float32 terms.
    assert [value for _, value in entry.top] == pytest.approx(
        [expected[label].item() for label in labels], abs=1e-5
    )
    likeliest = plain[1].logprobs[0].top
    (again,) = SAMPLER.logprobs(
        logits[1:2], [entry.token_id], [20], labels=[[token_id for token_id, _ in likeliest]]
    )
    assert again.top == likeliest


def test_ranks_count_the_likelier_tokens() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 1.0, 2.0, 4.0]])
    assert [entry.rank for entry in SAMPLER.logprobs(logits, [2, 1], [1, 1], ranks=True)] == [3, 4]
    assert [entry.rank for entry in SAMPLER.logprobs(logits, [3, 0], [0, 2], ranks=True)] == [1, 1]
    assert SAMPLER.logprobs(logits, [3, 0], [0, 2])[0].rank is None
