"""Grammar masks in the sampler: they bind their own rows, come last, and leave the raw log-probabilities
alone."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
import torch

from model.interface.grammar_state import GrammarFault
from model.interface.sampling_params import SamplingParams
from model.sampling.sampler import NOTHING_LEFT
from tests.model.sampling.test_sampler import GREEDY, RANDOM, VOCAB, Row, chunk, random_logits, sample


@dataclass
class FixedMask:
    bits: bytes | None
    is_complete: bool = False

    def mask(self) -> bytes | None:
        if self.bits == b"fault":
            raise GrammarFault("too complex")
        return self.bits

    def accept(self, token_id: int) -> None:
        raise AssertionError("the sampler moves no grammar")


def only(token_ids: Iterable[int], width: int = VOCAB) -> FixedMask:
    bits = bytearray(-(-width // 8))
    for token_id in token_ids:
        bits[token_id >> 3] |= 1 << (token_id & 7)
    return FixedMask(bytes(bits))


def constrained(
    grammar: FixedMask, sampling: SamplingParams = RANDOM, output: list[int] | None = None
) -> Row:
    return replace(chunk(sampling, output=output), grammar=grammar)


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        RANDOM,
        replace(RANDOM, top_k=5),
        replace(RANDOM, top_p=0.5),
        replace(RANDOM, min_p=0.3),
        replace(RANDOM, top_k=1),
    ],
)
def test_only_tokens_of_the_mask_are_drawn(sampling: SamplingParams) -> None:
    allowed = {0, 7, 8, 1024, VOCAB - 1}
    logits = random_logits(40)
    chunks = [constrained(only(allowed), replace(sampling, seed=seed)) for seed in range(40)]
    drawn = [result.token_ids[0] for result in sample(logits, chunks)]
    assert set(drawn) <= allowed
    assert len(set(drawn)) > 1
    if sampling.greedy:
        order = sorted(allowed)
        assert drawn == [order[int(row[order].argmax())] for row in logits]


def test_free_rows_draw_what_they_draw_alone() -> None:
    logits = random_logits(6)
    chunks = [replace(chunk(replace(RANDOM, seed=seed, logprobs=3)), grammar=None) for seed in range(6)]
    alone = sample(logits.clone(), chunks)
    mixed = [replace(c, grammar=only({seed + 1})) if seed % 2 else c for seed, c in enumerate(chunks)]
    for seed, (result, expected) in enumerate(zip(sample(logits.clone(), mixed), alone, strict=True)):
        if seed % 2:
            assert result.token_ids == [seed + 1]
        else:
            assert result == expected


def test_log_probabilities_are_those_without_a_mask() -> None:
    logits = random_logits(1)
    result = sample(logits, [constrained(only({5}), replace(GREEDY, logprobs=4))])[0]
    raw = logits[0].log_softmax(0)
    assert result.logprobs[0].logprob == pytest.approx(float(raw[5]), abs=1e-4)  # float32 rounding
    assert [token for token, _ in result.logprobs[0].top] == raw.topk(4).indices.tolist()


def test_bias_and_penalties_choose_among_what_the_mask_leaves() -> None:
    sampling = replace(GREEDY, logit_bias=((9, 100.0), (11, 50.0)))
    assert sample(random_logits(), [constrained(only({10, 11, 12}), sampling)])[0].token_ids == [11]


def test_min_tokens_loses_to_the_grammar() -> None:
    sampling = replace(GREEDY, stop_token_ids=frozenset({3}), min_tokens=64)
    assert sample(random_logits(), [constrained(only({3}), sampling)])[0].token_ids == [3]


def test_a_complete_grammar_draws_nothing() -> None:
    chunks = [constrained(FixedMask(None), replace(RANDOM, logprobs=2)), chunk(GREEDY)]
    complete, free = sample(random_logits(2), chunks)
    assert complete.token_ids == []
    assert complete.logprobs == []
    assert complete.error is None
    assert len(free.token_ids) == 1


def test_a_fault_and_a_mask_that_leaves_nothing_fail_alone() -> None:
    nothing = replace(GREEDY, allowed_token_ids=(1,))
    chunks = [constrained(FixedMask(b"fault")), constrained(only({2}), nothing), chunk(GREEDY)]
    fault, excluded, free = sample(random_logits(3), chunks)
    assert fault.error == "too complex"
    assert excluded.error == NOTHING_LEFT
    assert free.error is None


def test_a_mask_that_cannot_be_computed_and_logits_that_are_not_finite() -> None:
    """The numerical fault is told; the mask is not even asked for."""
    logits = random_logits(2)
    logits[0, 5] = torch.nan
    failed, fine = sample(logits, [constrained(FixedMask(b"fault")), constrained(only({4}))])
    assert failed.error is not None
    assert "finite" in failed.error
    assert fine.token_ids == [4]


@pytest.mark.parametrize("width", [8, 100, 2999, 3000, 3001, 4096])
def test_a_mask_of_another_width_allows_nothing_beyond_either_end(width: int) -> None:
    allowed = only(range(width), width)
    logits = random_logits(20)
    results = sample(logits, [constrained(allowed, replace(RANDOM, seed=seed)) for seed in range(20)])
    limit = min(VOCAB, -(-width // 8) * 8)
    assert all(result.token_ids[0] < limit for result in results)


def test_raw_logits_are_kept_where_another_row_reports_them() -> None:
    logits = random_logits(2)
    raw = logits.clone()
    chunks = [constrained(only({5})), chunk(replace(GREEDY, logprobs=0))]
    reported = sample(logits, chunks)[1].logprobs[0].logprob
    assert torch.equal(logits, raw)
    assert reported == pytest.approx(float(raw[1].log_softmax(0).max()), abs=1e-4)  # float32 rounding
