"""Rows that decode together as arrays: what happens to one of them leaves the others as they are."""

from typing import Any

import pytest

from model.interface.sequence_chunk import NOT_FINITE, StepInput, StepResult
from tests.server.engine.harness import CheckingRunner, Harness, expected_tokens
from tests.server.engine.scheduler.test_scheduler import prompt


class FaultyAtOnce(CheckingRunner):
    """In its eighth step of bare tokens, the second sequence's logits are not finite."""

    def run(self, step: StepInput) -> StepResult:
        results = super().run(step)
        if not results.others and self.num_array_steps == 8:
            results.token_ids[1] = -1
        return results


def decoding(engine: Harness, count: int = 4, max_tokens: int = 30) -> list[str]:
    requests = [engine.add(prompt(5 + i, i), max_tokens=max_tokens) for i in range(count)]
    while engine.runner.num_array_steps < 5:
        engine.step()
    return requests


def test_a_row_that_is_not_finite_ends_alone() -> None:
    engine = Harness()
    engine.core._runner = engine.runner = FaultyAtOnce(engine.spec)
    requests = decoding(engine)
    engine.run()
    assert str(engine.errors[requests[1]]) == NOT_FINITE
    assert engine.core.stats.numerical_faults_total == 1
    for i in (0, 2, 3):
        assert engine.tokens(requests[i]) == expected_tokens(prompt(5 + i, i), 30)
    assert engine.runner.num_array_steps > 8


def test_an_abort_between_two_steps_and_a_new_request_change_nothing_for_the_others() -> None:
    engine = Harness()
    requests = decoding(engine)
    engine.core.abort(requests[0])
    engine.step()
    late = engine.add(prompt(20, 9), max_tokens=12)
    engine.run()
    for i in (1, 2, 3):
        assert engine.tokens(requests[i]) == expected_tokens(prompt(5 + i, i), 30)
    assert engine.tokens(late) == expected_tokens(prompt(20, 9), 12)


def test_a_step_without_memory_for_all_is_run_in_parts() -> None:
    engine = Harness()
    requests = decoding(engine)
    engine.runner.memory = 3
    engine.step()
    engine.step()
    engine.runner.memory = None
    assert engine.runner.num_refused == 2
    engine.run()
    for i, request in enumerate(requests):
        assert engine.tokens(request) == expected_tokens(prompt(5 + i, i), 30)


@pytest.mark.parametrize("odd", [{"logprobs": 1}, {"presence_penalty": 0.5}, {"min_tokens": 3}])
def test_one_that_wants_more_than_its_token_sends_all_the_general_way(odd: dict[str, Any]) -> None:
    engine = Harness()
    requests = decoding(engine)
    other = engine.add(prompt(7, 7), max_tokens=10, **odd)
    before = engine.runner.num_array_steps
    while not engine.outputs[other] or engine.finish_reason(other) is None:
        engine.step()
    assert engine.runner.num_array_steps == before
    engine.run()
    assert engine.runner.num_array_steps > before
    assert engine.tokens(other) == expected_tokens(prompt(7, 7), 10)
    for i, request in enumerate(requests):
        assert engine.tokens(request) == expected_tokens(prompt(5 + i, i), 30)


def test_one_that_was_preempted_and_finds_itself_in_the_prefix_cache_joins_those_that_decode() -> None:
    """Both say the same, so that all that the second has computed is found where the first has it."""
    engine = Harness(num_global_blocks=21)
    requests = [engine.add(prompt(3), max_tokens=count) for count in (60, 40)]
    joined = False
    while engine.core.has_work:
        num_running, num_array_steps = engine.core.scheduler.num_running, engine.runner.num_array_steps
        num_preempted = engine.core.stats.preemptions_total
        engine.step()
        joined = joined or (
            num_running == 1
            and num_preempted > 0
            and engine.runner.num_array_steps > num_array_steps
            and len(engine.runner.steps[-1]) == 2
        )
    assert joined
    assert engine.core.stats.preemptions_total > 0
    for request, count in zip(requests, (60, 40), strict=True):
        assert engine.tokens(request) == expected_tokens(prompt(3), count)
