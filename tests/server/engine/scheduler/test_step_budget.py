"""How many tokens a step may have, by measured times and after a lack of memory."""

import pytest

from server.engine.scheduler.step_budget import MIXED_STEP_RATIO, StepBudget
from server.engine.stats import StepKind, StepStats


def step(kind: StepKind, duration: float, num_prefill_tokens: int = 0) -> StepStats:
    return StepStats(kind, duration, 0.0, num_prefill_tokens + 1, 1, num_prefill_tokens)


def test_prefills_get_what_decodes_leave_and_less_beside_them() -> None:
    budget = StepBudget(64, 4)
    assert budget.for_prefills(0) == 64
    assert budget.for_prefills(60) == 4
    assert budget.for_prefills(70) == -6
    budget.mixed_prefill_tokens = 8
    assert budget.for_prefills(1) == 8
    assert budget.for_prefills(0) == 64, "alone, they have the whole step"


def test_nothing_is_held_back_before_both_kinds_of_steps_were_measured() -> None:
    budget = StepBudget(64, 4)
    budget.observe(step("prefill", 1.0, 50))
    assert budget.mixed_prefill_tokens == 64
    budget.observe(step("decode", 0.1))
    assert budget.mixed_prefill_tokens == int((MIXED_STEP_RATIO - 1) * 0.1 / (1.0 / 50))


def test_of_a_mixed_step_only_what_a_decode_step_does_not_take_is_prefilling() -> None:
    budget = StepBudget(1000, 4)
    budget.observe(step("decode", 0.1))
    budget.observe(step("mixed", 0.3, 20))
    assert budget.mixed_prefill_tokens == pytest.approx((MIXED_STEP_RATIO - 1) * 0.1 / (0.2 / 20), abs=1)


def test_one_odd_step_moves_the_average_by_a_fifth() -> None:
    budget = StepBudget(1000, 4)
    budget.observe(step("prefill", 1.0, 100))
    budget.observe(step("decode", 0.1))
    budget.observe(step("decode", 1.1))
    assert budget.mixed_prefill_tokens == int((MIXED_STEP_RATIO - 1) * 0.3 / 0.01)


@pytest.mark.parametrize(("decode", "expected"), [(1e-9, 4), (1e9, 64)])
def test_the_share_is_never_less_than_a_block_or_more_than_a_step(decode: float, expected: int) -> None:
    budget = StepBudget(64, 4)
    budget.observe(step("prefill", 1.0, 50))
    budget.observe(step("decode", decode))
    assert budget.mixed_prefill_tokens == expected


def test_a_prefill_that_took_no_time_tells_nothing() -> None:
    budget = StepBudget(64, 4)
    budget.observe(step("decode", 0.1))
    budget.observe(step("mixed", 0.1, 20))
    assert budget.mixed_prefill_tokens == 64


def test_a_step_without_memory_halves_the_next_and_others_grow_by_a_token() -> None:
    budget = StepBudget(64, 4)
    budget.found_no_memory(40)
    assert budget.max_step_tokens == 20
    budget.found_memory()
    assert budget.max_step_tokens == 21
    budget.found_no_memory(3)
    assert budget.max_step_tokens == 4, "a block at least"
    for _ in range(100):
        budget.found_memory()
    assert budget.max_step_tokens == 64
