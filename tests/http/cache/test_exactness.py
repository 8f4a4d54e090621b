"""What a client gets depends on its request alone: not on chunks, cached prefixes, neighbours or preemption.
Checked over HTTP on log-probabilities in float32."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http.cache.tiny_server import (
    ONLY_DIGITS,
    PLAIN_TEXT,
    WANDERING,
    Answer,
    ask,
    assert_close,
    assert_same,
    at_once,
    id_of_text,
    ids,
    in_one_step,
    tiny_server,
)
from tests.http.live_server import LiveServer

# Around blocks of 16, the window of 64, the chunks of 16, 64 and 256, and far beyond all of them.
LENGTHS = (
    1,
    2,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    79,
    80,
    81,
    127,
    128,
    129,
    255,
    256,
    257,
    511,
    512,
    513,
    1023,
    1024,
    1025,
    1500,
)
WHOLE = 2048  # longer than every prompt here


def scoring(prompt: list[int], max_tokens: int = 3) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "echo": True,
        "logprobs": 3,
    }


@pytest.fixture(scope="module")
def fresh(tiny_folder: Path) -> Iterator[LiveServer]:
    """Whole prompts in one step and no prefix cache: what everything else is compared with."""
    with tiny_server(tiny_folder, max_num_batched_tokens=WHOLE, prefix_caching=False) as live:
        yield live


@pytest.fixture(scope="module")
def expected(fresh: LiveServer) -> dict[int, Answer]:
    return {length: ask(fresh, scoring(ids(length, seed=length))) for length in LENGTHS}


@pytest.fixture(scope="module")
def chunked(tiny_folder: Path) -> Iterator[LiveServer]:
    with tiny_server(tiny_folder, max_num_seqs=16) as live:
        yield live


@pytest.mark.parametrize("chunk", [16, 64, 256, WHOLE])
def test_every_length_gets_the_same_logprobs_in_every_chunk_size(
    tiny_folder: Path, chunk: int, expected: dict[int, Answer]
) -> None:
    lengths = [length for length in LENGTHS if length <= 40 * chunk]
    with tiny_server(tiny_folder, max_num_batched_tokens=chunk) as server:
        for length, got in zip(
            lengths, at_once(lambda n: ask(server, scoring(ids(n, seed=n))), lengths), strict=True
        ):
            assert_same(got, expected[length])
        for length in (17, 257):
            for _ in range(2):
                assert_same(ask(server, scoring(ids(length, seed=length))), expected[length])


def test_a_continuation_far_beyond_the_window_is_what_a_fresh_prefill_of_it_says(
    chunked: LiveServer, fresh: LiveServer
) -> None:
    prompt = ids(100)
    body = {
        "prompt": prompt,
        "max_tokens": 300,
        "seed": 5,
        "logprobs": 0,
        "logit_bias": PLAIN_TEXT,
        **WANDERING,
    }
    generated = ask(chunked, body)
    assert generated.finish_reason == "length"
    id_of = id_of_text()
    continued = prompt + [id_of[token] for token in generated.tokens]
    assert len(set(continued[100:])) > 20, "an answer that repeats itself would show little"
    for server in (fresh, chunked):
        again = ask(server, scoring(continued, max_tokens=0))
        assert_close(again.logprobs[100:], generated.logprobs)


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("length", [16, 32, 64, 80, 512, 528, 1024])
def test_a_prompt_that_is_wholly_cached_gets_the_same_answer(
    chunked: LiveServer, length: int, extra: int
) -> None:
    length += extra
    body = {
        "prompt": ids(length, seed=length),
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": 5,
        "ignore_eos": True,
    }
    first, *others = [ask(chunked, body) for _ in range(3)]
    assert first.cached_tokens == 0
    for other in others:
        assert_same(other, first, usage_too=False)
        assert other.cached_tokens == (length - 1) // 16 * 16 <= length - 1


def test_two_copies_at_once_compute_their_prompt_once_and_answer_the_same(
    chunked: LiveServer, fresh: LiveServer
) -> None:
    for length in (528, 529):
        body = {
            "prompt": ids(length, seed=9000 + length),
            "max_tokens": 6,
            "temperature": 0,
            "logprobs": 5,
            "ignore_eos": True,
        }
        before = chunked.metric("prefill_tokens_total")
        first, second = at_once(lambda item: ask(chunked, item), [body, body])
        assert sorted((first.cached_tokens, second.cached_tokens)) == [0, (length - 1) // 16 * 16]
        assert chunked.metric("prefill_tokens_total") - before == length + length - (length - 1) // 16 * 16
        alone = ask(fresh, body)
        assert_same(first, alone, usage_too=False)
        assert_same(second, alone, usage_too=False)


@pytest.mark.parametrize("count", [1, 3, 7, 15])
def test_neighbours_change_nothing(chunked: LiveServer, fresh: LiveServer, count: int) -> None:
    mine = {
        "prompt": ids(81, seed=500),
        "max_tokens": 64,
        "temperature": 0,
        "frequency_penalty": 2,
        "logprobs": 3,
    }
    alone = ask(fresh, mine)
    sampled = {"logit_bias": PLAIN_TEXT, **WANDERING}
    neighbours = [
        {"prompt": ids(5 + 23 * i, seed=600 + 20 * count + i), "max_tokens": 20 + i, "seed": i, **sampled}
        for i in range(count)
    ]
    # Three neighbours and fifteen find the cache hot from the round before; half of them are sent before,
    # half after.
    half = count // 2
    answers = at_once(lambda item: ask(chunked, item), [*neighbours[:half], mine, *neighbours[half:]])
    assert_same(answers[half], alone, usage_too=False)


EDITS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 2},
    {"presence_penalty": 2, "frequency_penalty": 2},
    {"frequency_penalty": -2},
    {"logit_bias": ONLY_DIGITS},
    {},
)


@pytest.mark.parametrize("first", [0, len(EDITS) - 1])
def test_what_one_request_does_to_its_logits_touches_no_other(
    chunked: LiveServer, fresh: LiveServer, first: int
) -> None:
    """Cases 36 and 57: whichever comes first, together and alone."""
    bodies = [
        {"prompt": ids(33, seed=800), "max_tokens": 24, "temperature": 0, "logprobs": 0, **edit}
        for edit in EDITS
    ]
    alone = [ask(fresh, body) for body in bodies]
    assert len({answer.tokens for answer in alone}) >= 4, "the edits change something"
    order = sorted(range(len(bodies)), key=lambda index: (index - first) % len(bodies))
    together = at_once(lambda body: ask(chunked, body), [bodies[index] for index in order])
    for index, answer in zip(order, together, strict=True):
        assert_same(answer, alone[index], usage_too=False)


def test_penalties_of_generated_tokens_do_not_count_the_prompt(fresh: LiveServer) -> None:
    """Case 57: a prompt full of what the model would say next does not keep it from saying it."""
    body: dict[str, Any] = {
        "prompt": ids(33, seed=801),
        "max_tokens": 1,
        "temperature": 0,
        "return_token_ids": True,
    }
    (likeliest,) = fresh.complete(**body)["choices"][0]["token_ids"]
    full = {**body, "prompt": [*body["prompt"], *[likeliest] * 20]}
    plain = fresh.complete(**full)["choices"][0]["token_ids"]
    for penalties in ({"presence_penalty": 2}, {"frequency_penalty": 2}):
        assert fresh.complete(**full, **penalties)["choices"][0]["token_ids"] == plain


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "presence_penalty": 1, "logprobs": 2},
    {"temperature": 1.5, "seed": 7, "logprobs": 2},
    {"temperature": 0, "frequency_penalty": 2, "logprobs": 0},
    {"temperature": 0, "echo": True, "logprobs": 2},
    {"temperature": 2, "seed": 11, "top_p": 0.9, "repetition_penalty": 1.3, "stream": True, "logprobs": 1},
)


def test_preempted_requests_get_what_they_get_alone(fresh: LiveServer, tiny_folder: Path) -> None:
    bodies = [
        {
            "prompt": ids(100, seed=700 + i),
            "max_tokens": 50,
            "logit_bias": PLAIN_TEXT,
            **KINDS[i % len(KINDS)],
        }
        for i in range(8)
    ]
    alone = [ask(fresh, body) for body in bodies]
    # less than three of the eight at their full length
    with tiny_server(tiny_folder, pool_tokens=448) as tight:
        together = in_one_step(tight, lambda body: ask(tight, body), bodies)
        assert tight.metric("preemptions_total") > 0
        for got, expected in zip(together, alone, strict=True):
            assert expected.usage["completion_tokens"] == 50
            assert_same(got, expected)
        generated = tight.metric("generation_tokens_total")
        assert generated == 8 * 50, "recomputed tokens must not count as generated"
