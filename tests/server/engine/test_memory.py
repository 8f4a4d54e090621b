"""A step that the device has no memory for is run in parts, with the same results; what does not fit even
alone fails alone."""

import pytest

from tests.server.engine.harness import Harness, expected_tokens

PROMPTS = [
    list(range(first, first + length))
    for first, length in ((0, 30), (100, 7), (200, 1), (300, 21), (400, 16))
]


@pytest.mark.parametrize("memory", [1, 2, 3, 5, 8, 13])
def test_results_are_those_of_a_roomy_device(memory: int) -> None:
    engine = Harness()
    engine.runner.memory = memory
    requests = [
        engine.add(prompt, 6, prompt_logprobs=1 if index % 2 else None)
        for index, prompt in enumerate(PROMPTS)
    ]
    engine.run()
    assert engine.runner.num_refused > 0
    assert engine.core.stats.memory_faults_total == engine.runner.num_refused
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert engine.tokens(request) == expected_tokens(prompt, 6)
        scored = engine.outputs[request][0].prompt_logprobs
        if scored is not None:
            assert [entry.token_id for entry in scored] == prompt[1:]
    assert engine.errors == {}
    assert engine.core.stats.numerical_faults_total == 0


def test_what_does_not_fit_alone_fails_and_the_engine_goes_on() -> None:
    engine = Harness()
    engine.runner.memory = 0
    lost = [engine.add(prompt) for prompt in PROMPTS]
    engine.run()
    assert sorted(engine.errors) == sorted(lost)
    assert "ran out of memory" in str(engine.errors[lost[0]])
    assert engine.core.stats.numerical_faults_total == 0
    engine.runner.memory = None
    request = engine.add(PROMPTS[0])
    engine.run()
    assert engine.tokens(request) == expected_tokens(PROMPTS[0], 4)


def test_later_prefills_are_smaller_and_grow_again() -> None:
    engine = Harness(num_global_blocks=400, max_num_batched_tokens=32)
    engine.runner.memory = 20
    engine.add(list(range(400)), 1)
    for _ in range(3):
        engine.step()
    assert engine.runner.num_refused == 1, "32 tokens do not fit, 16 and 17 and 18 do"
    assert engine.core.scheduler.budget.max_step_tokens == 18
    engine.runner.memory = None
    for _ in range(14):
        engine.step()
    assert engine.core.scheduler.budget.max_step_tokens == 32
    engine.step()
    assert engine.core.scheduler.budget.max_step_tokens == 32


def test_any_other_fault_of_the_runner_is_not_survived() -> None:
    engine = Harness()
    engine.runner.memory = 8
    engine.runner.fail_at_step = 1
    engine.add(PROMPTS[0])
    with pytest.raises(RuntimeError, match="planted fault"):
        engine.run()
