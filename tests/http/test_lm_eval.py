"""The request of lm-eval's local-completions, read exactly as lm-eval reads it, against logits computed in
this process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from model.interface.kv_cache_spec import KVCachePlan
from model.interface.sequence_chunk import StepInput
from tests.http.cache.tiny_server import NUM_TOKENS, TOLERANCE, ids, tiny_server
from tests.http.live_server import LiveServer
from tests.lm_eval.client import parse_logprobs, scoring_body
from tests.tiny import tiny_config, tiny_runner, write_tiny_folder

EOS = 1
CONTEXT_LENGTHS = [1, 17, 30, 64, 90]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    before = torch.get_num_threads()
    with tiny_server(write_tiny_folder(tmp_path_factory.mktemp("tiny"))) as live:
        yield live
    torch.set_num_threads(before)


def reference_logprobs(prompt: list[int]) -> torch.Tensor:
    """[len(prompt), NUM_TOKENS]: of the token after each position, from one unbatched pass in this
    process."""
    num_blocks = 16
    spec = tiny_config().kv_cache_spec(16, 4)
    plan = KVCachePlan(
        num_global_blocks=num_blocks,
        num_local_blocks=num_blocks,
        global_bytes=num_blocks * spec.global_block_bytes,
        local_bytes=num_blocks * spec.local_block_bytes,
        capacity_tokens=(num_blocks - 1) * 16,
    )
    runner = tiny_runner(plan)
    table = list(range(1, num_blocks))
    hidden = runner.hidden_states(StepInput.of_prompt(prompt, table))
    with torch.inference_mode():
        return runner.model.logits(hidden)[:, :NUM_TOKENS].double().log_softmax(dim=-1)


def greedy_continuation(server: LiveServer, context: list[int], length: int) -> list[int]:
    body = {
        "prompt": context,
        "max_tokens": length,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    token_ids: list[int] = server.complete(**body)["choices"][0]["token_ids"]
    return token_ids


def test_sums_and_greedy_flags_are_those_of_the_model(tiny: LiveServer) -> None:
    prompts, lengths = [], []
    for seed, context_length in enumerate(CONTEXT_LENGTHS):
        context = ids(context_length, seed)
        greedy = greedy_continuation(tiny, context, 6)
        other = [*greedy[:3], 20 + (greedy[3] + 1) % 40, *greedy[4:]]
        assert other != greedy
        for continuation in (greedy, other):
            prompts.append(context + continuation)
            lengths.append(context_length)
    name = tiny.client.get("/v1/models").json()["data"][0]["id"]
    answer = tiny.complete(**scoring_body(name, prompts))
    results = parse_logprobs(answer, lengths)
    assert [is_greedy for _, is_greedy in results] == [True, False] * len(CONTEXT_LENGTHS)
    for prompt, length, (total, _) in zip(prompts, lengths, results, strict=True):
        logprobs = reference_logprobs(prompt)
        expected = sum(
            logprobs[position - 1, prompt[position]].item() for position in range(length, len(prompt))
        )
        assert total == pytest.approx(expected, abs=len(prompt) * TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"logit_bias": {str(EOS): 100}}, {"allowed_token_ids": [EOS]}])
def test_there_is_exactly_one_generated_entry_whatever_it_is(
    tiny: LiveServer, options: dict[str, Any]
) -> None:
    prompts = [ids(length, length) for length in CONTEXT_LENGTHS]
    body = scoring_body("tiny", prompts)
    del body["model"]
    answer = tiny.complete(**body, **options)
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        lists = choice["logprobs"]
        assert {len(values) for values in lists.values()} == {len(prompt) + 1}
        assert lists["token_logprobs"][0] is None
        assert choice["finish_reason"] == ("stop" if options else "length")
        # The value of a token is bit for bit the one that its text has among the alternatives, unless a
        # likelier one looks alike.
        for token, value, top in zip(
            lists["tokens"][1:], lists["token_logprobs"][1:], lists["top_logprobs"][1:], strict=True
        ):
            assert top[token] == value or (token == "\ufffd" and top[token] > value)
    if options:
        assert [choice["logprobs"]["tokens"][-1] for choice in answer["choices"]] == ["<eos>"] * len(prompts)


def test_a_second_run_from_the_prefix_cache_scores_the_same(tiny: LiveServer) -> None:
    prompts = [ids(90, 7) + ids(8, seed)[1:] for seed in range(3)]
    body = scoring_body("tiny", prompts)
    del body["model"]
    first = parse_logprobs(tiny.complete(**body), [90] * 3)
    tiny.complete(prompt=prompts[0], max_tokens=4)
    second = parse_logprobs(tiny.complete(**body), [90] * 3)
    assert [total for total, _ in second] == pytest.approx([total for total, _ in first], abs=TOLERANCE)
