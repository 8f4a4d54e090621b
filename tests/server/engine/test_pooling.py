"""Requests that want the mean of their prompt's hidden states: one output, every token counted once, whatever
the scheduler does."""

import pytest

from tests.server.engine.harness import Harness, expected_tokens, sum_of_states

PROMPT = list(range(100, 137))


def mean(harness: Harness, request_id: str) -> list[float]:
    (output,) = harness.outputs[request_id]
    assert output.token_ids == []
    assert output.finish_reason == "stop"
    assert output.mean_hidden is not None
    values: list[float] = output.mean_hidden.tolist()
    return values


def expected(prompt: list[int]) -> list[float]:
    values: list[float] = (sum_of_states(prompt) / len(prompt)).tolist()
    return values


@pytest.mark.parametrize("max_num_batched_tokens", [8, 16, 64])
def test_a_prompt_in_chunks_is_pooled_whole(max_num_batched_tokens: int) -> None:
    harness = Harness(max_num_batched_tokens=max_num_batched_tokens)
    requests = [harness.add(PROMPT[:length], max_tokens=0, pooling=True) for length in (1, 3, 8, 37)]
    harness.run()
    for request_id, length in zip(requests, (1, 3, 8, 37), strict=True):
        assert mean(harness, request_id) == pytest.approx(expected(PROMPT[:length]))


@pytest.mark.parametrize("memory", [1, 3, 5, 20])
def test_a_prompt_whose_step_runs_in_parts_for_lack_of_memory_is_pooled_whole(memory: int) -> None:
    harness = Harness()
    harness.runner.memory = memory
    request = harness.add(PROMPT, max_tokens=0, pooling=True)
    harness.run()
    assert harness.runner.num_refused > 0
    assert mean(harness, request) == pytest.approx(expected(PROMPT))


def test_a_cached_prefix_is_computed_again() -> None:
    harness = Harness()
    for _ in range(2):
        pooled = harness.add(PROMPT, max_tokens=0, pooling=True)
        harness.run()
        assert mean(harness, pooled) == pytest.approx(expected(PROMPT))
        assert harness.outputs[pooled][0].num_cached_tokens == 0
    # What it computed serves others.
    after = harness.add(PROMPT, max_tokens=2)
    harness.run()
    assert harness.outputs[after][0].num_cached_tokens > 0


def test_a_preempted_prompt_is_pooled_once() -> None:
    harness = Harness(num_global_blocks=16, max_num_batched_tokens=8, over_admission=True)
    generating = [harness.add([7, 8, 9, index], max_tokens=20) for index in range(2)]
    pooled = [harness.add([index, *PROMPT], max_tokens=0, pooling=True) for index in range(3)]
    harness.run()
    assert harness.core.stats.preemptions_total > 0
    assert any(harness.outputs[request_id][0].timings.num_preemptions for request_id in pooled)
    for index, request_id in enumerate(pooled):
        assert mean(harness, request_id) == pytest.approx(expected([index, *PROMPT]))
    for index, request_id in enumerate(generating):
        assert harness.tokens(request_id) == expected_tokens([7, 8, 9, index], 20)


def test_streams_get_a_token_in_every_step_beside_it() -> None:
    harness = Harness(max_num_batched_tokens=8)
    running = harness.add([1, 2, 3], max_tokens=12)
    harness.step()
    harness.add(PROMPT, max_tokens=0, pooling=True)
    for _ in range(11):
        before = len(harness.tokens(running))
        harness.step()
        assert len(harness.tokens(running)) == before + 1
