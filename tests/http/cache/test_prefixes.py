"""The prefix cache as a client sees it: what ``cached_tokens`` says, who shares with whom, and what a hit
saves."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http.cache.tiny_server import CHAT, COMPLETIONS, ONLY_DIGITS, ask, ids, tiny_server
from tests.http.live_server import LiveServer


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[LiveServer]:
    with tiny_server(tiny_folder, pool_tokens=9000, max_num_batched_tokens=256) as live:
        yield live


def usage_of(server: LiveServer, **body: Any) -> dict[str, Any]:
    usage: dict[str, Any] = server.complete(max_tokens=2, ignore_eos=True, **body)["usage"]
    return usage


def cached(usage: dict[str, Any]) -> int:
    count: int = usage["prompt_tokens_details"]["cached_tokens"]
    return count


def test_a_list_of_prompts_reports_the_sum_of_its_hits(server: LiveServer) -> None:
    first, second, third = ids(40, seed=1), ids(50, seed=2), ids(70, seed=3)
    assert cached(usage_of(server, prompt=[first, second], temperature=0)) == 0
    usage = usage_of(server, prompt=[first, third, second], temperature=0)
    assert usage["prompt_tokens"] == 40 + 70 + 50
    assert cached(usage) == 32 + 0 + 48
    fourth = ids(33, seed=4)
    assert cached(usage_of(server, prompt=[fourth, fourth, fourth], temperature=0)) == 0 + 32 + 32


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 3}])
def test_choices_count_their_prompt_and_its_hit_once(server: LiveServer, sampling: dict[str, Any]) -> None:
    prompt = ids(40, seed=10 + len(sampling))
    for expected in (0, 32):
        usage = usage_of(server, prompt=prompt, n=3, **sampling)
        assert (usage["prompt_tokens"], cached(usage), usage["completion_tokens"]) == (40, expected, 6)
    usage = usage_of(server, prompt=[prompt, prompt[:20]], n=3, **sampling)
    assert (usage["prompt_tokens"], cached(usage), usage["completion_tokens"]) == (60, 32 + 16, 12)


def test_requests_share_only_under_the_same_salt(server: LiveServer) -> None:
    prompt = ids(33, seed=20)
    salts = (None, "a", "b", "a", None, "b")
    assert [cached(usage_of(server, prompt=prompt, cache_salt=salt)) for salt in salts] == [
        0,
        0,
        0,
        32,
        32,
        32,
    ]


def test_other_prompts_of_the_same_blocks_share_nothing_behind_their_first_difference(
    server: LiveServer,
) -> None:
    first, second = ids(64, seed=30), ids(64, seed=31)
    usage_of(server, prompt=first)
    usage_of(server, prompt=second)
    assert cached(usage_of(server, prompt=first[:16] + second[16:])) == 16
    assert cached(usage_of(server, prompt=second[16:48] + first[:16])) == 0


def test_the_next_turn_of_a_chat_hits_up_to_the_last_full_block_of_the_turn_before(
    server: LiveServer,
) -> None:
    messages = [{"role": "user", "content": "tell a tale"}]
    computed = 0
    for turn in range(3):
        body = {
            "messages": messages,
            "max_tokens": 21,
            "temperature": 1,
            "seed": turn,
            "logit_bias": ONLY_DIGITS,
        }
        answer = server.chat(**body)
        usage = answer["usage"]
        assert cached(usage) == computed // 16 * 16
        computed = usage["total_tokens"] - 1  # the last token was sampled, never run
        messages += [
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
            {"role": "user", "content": "on"},
        ]


def time_to_first_chunk(server: LiveServer, body: dict[str, Any]) -> float:
    started = time.monotonic()
    with server.client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response:
        chunks = response.iter_raw()
        next(chunks)
        seconds = time.monotonic() - started
        for _ in chunks:
            pass
    return seconds


def test_a_long_prompt_comes_back_in_a_fraction_of_its_first_time(server: LiveServer) -> None:
    ratios = []
    for turn in range(6):  # other programs may take the processor for a moment: one undisturbed pair shows it
        body = {"prompt": ids(4000, seed=40 + turn), "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        first = time_to_first_chunk(server, body)
        again = min(time_to_first_chunk(server, body) for _ in range(2))
        assert ask(server, body).cached_tokens == 3984
        ratios.append(again / first)
        if ratios[-1] < 0.15:
            return
    pytest.fail(f"again / first: {ratios}")


def test_metrics_tell_hits_and_what_was_computed(server: LiveServer) -> None:
    names = (
        "prompt_tokens_total",
        "prompt_tokens_cached_total",
        "prefill_tokens_total",
        "prefix_cache_hit_tokens_total",
    )
    before = {name: server.metric(name) for name in names}
    for _ in range(2):
        usage_of(server, prompt=ids(100, seed=50))
    assert {name: server.metric(name) - before[name] for name in names} == {
        "prompt_tokens_total": 200,
        "prompt_tokens_cached_total": 96,
        "prefill_tokens_total": 104,
        "prefix_cache_hit_tokens_total": 96,
    }


def test_without_prefix_caching_nothing_is_kept(tiny_folder: Path) -> None:
    with tiny_server(tiny_folder, prefix_caching=False) as server:
        answers = [ask(server, {"prompt": ids(100), "max_tokens": 3, "temperature": 0}) for _ in range(2)]
        assert [answer.cached_tokens for answer in answers] == [0, 0]
        for pool in ("global", "local"):
            assert server.metric("kv_cache_blocks", pool=pool, state="cached") == 0
        assert (
            server.chat(messages=[{"role": "user", "content": "Hi"}], max_tokens=2)["usage"][
                "completion_tokens"
            ]
            == 2
        )


def test_both_endpoints_share_the_cache(server: LiveServer) -> None:
    prompt = "<bos><start_of_turn>user\ntell a long tale of a will in it<end_of_turn>\n<start_of_turn>model\n"
    usage = server.complete(prompt=prompt, max_tokens=1)["usage"]
    body = {"messages": [{"role": "user", "content": "tell a long tale of a will in it"}], "max_tokens": 1}
    response = server.post(CHAT, body).json()["usage"]
    assert response["prompt_tokens"] == usage["prompt_tokens"]
    assert cached(response) == (usage["prompt_tokens"] - 1) // 16 * 16 > 0
