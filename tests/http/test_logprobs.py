"""Log-probabilities and echo: the legacy lists that scoring tools read, and chat's entries."""

from typing import Any

import pytest

from model.interface.sequence_chunk import TokenLogprobs
from server.api.generation.token_text import LegacyLogprobs, token_namer, wire_logprob
from tests.fakes import BOS, EOS, FIRST_BYTE, FIRST_TEXT, fake_tokenizer, greedy_token, token_logprobs
from tests.http.live_server import LiveServer
from tests.http.test_streams import CHAT, COMPLETIONS, MESSAGES, chunks_of, joined

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def streamed_lists(server: LiveServer, body: dict[str, Any]) -> dict[str, list[Any]]:
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks_of(server, COMPLETIONS, body)]
    return {name: [item for piece in pieces for item in piece[name]] for name in LISTS}


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_the_sampled_token_is_always_among_the_alternatives(server: LiveServer, k: int) -> None:
    answer = server.complete(prompt="Hello", max_tokens=12, temperature=1, seed=3, logprobs=k)
    lists = answer["choices"][0]["logprobs"]
    assert all(len(lists[name]) == 12 for name in LISTS)
    for token, logprob, top in zip(
        lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True
    ):
        assert top[token] >= logprob
        assert len(top) <= k + 1
        assert k > 0 or top == {token: logprob}


def test_echo_puts_the_prompt_in_front_and_nothing_stands_before_its_first_token(server: LiveServer) -> None:
    answer = server.complete(prompt="Hello", max_tokens=4, temperature=0, logprobs=1, echo=True)
    choice = answer["choices"][0]
    lists = choice["logprobs"]
    assert choice["text"].startswith("Hello")
    assert lists["tokens"][:6] == ["<bos>", "H", "e", "l", "l", "o"]
    assert len(lists["tokens"]) == 6 + 4
    assert lists["token_logprobs"][0] is None
    assert lists["top_logprobs"][0] is None
    assert lists["text_offset"][:7] == [0, 0, 1, 2, 3, 4, 5]
    for token, offset in zip(lists["tokens"][1:], lists["text_offset"][1:], strict=True):
        assert choice["text"][offset:].startswith(token) or "\ufffd" in token


def test_offsets_count_from_the_start_of_the_prompt_without_echo_too(server: LiveServer) -> None:
    for prompt in (
        "Hello",
        [BOS, FIRST_TEXT + 1, FIRST_TEXT + 2, FIRST_TEXT + 3, FIRST_TEXT + 4, FIRST_TEXT + 5],
    ):
        offsets = server.complete(prompt=prompt, max_tokens=6, temperature=0, logprobs=0)["choices"][0][
            "logprobs"
        ]["text_offset"]
        assert offsets[0] == 5
        assert offsets == sorted(offsets)


@pytest.mark.parametrize("echo", [False, True])
def test_streamed_lists_are_the_unstreamed_ones(server: LiveServer, echo: bool) -> None:
    body = {"prompt": "Hello", "max_tokens": 30, "temperature": 0, "logprobs": 2, "echo": echo}
    whole = server.complete(**body)["choices"][0]
    assert streamed_lists(server, body) == whole["logprobs"]
    assert joined(COMPLETIONS, chunks_of(server, COMPLETIONS, body)) == whole["text"]


def test_scoring_a_prompt_generates_nothing(server: LiveServer) -> None:
    for stream in (False, True):
        body = {"prompt": "Your answer: Yes", "max_tokens": 0, "logprobs": 1, "echo": True}
        if stream:
            lists = streamed_lists(server, body)
        else:
            answer = server.complete(**body)
            choice = answer["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("Your answer: Yes", "length")
            assert answer["usage"]["completion_tokens"] == 0
            lists = choice["logprobs"]
        assert [len(lists[name]) for name in LISTS] == [17] * 4
        assert lists["token_logprobs"][0] is None
    silent = server.complete(prompt="Hello", max_tokens=0)
    assert (silent["choices"][0]["text"], silent["choices"][0]["finish_reason"]) == ("", "length")


def test_the_call_of_lm_eval_finds_exactly_one_generated_entry_even_for_an_end_token(
    server: LiveServer,
) -> None:
    prompts = [[BOS, 400, 401, 402], [BOS, 410, 411]]
    body = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
    for extra in ({}, {"logit_bias": {str(EOS): 100}}):
        for prompt, choice in zip(prompts, server.complete(**body, **extra)["choices"], strict=True):
            lists = choice["logprobs"]
            assert len(lists["tokens"]) == len(prompt) + 1
            for position in range(1, len(prompt)):
                expected = token_logprobs(prompt[:position], prompt[position], 1)
                assert lists["token_logprobs"][position] == expected.logprob
                assert max(lists["top_logprobs"][position].values()) >= expected.logprob


def test_echoed_values_are_those_reported_while_generating(server: LiveServer) -> None:
    prompt = [BOS, 400, 401, 402]
    body = {"max_tokens": 12, "temperature": 0, "logprobs": 1}
    reported = server.complete(prompt=prompt, **body)["choices"][0]["logprobs"]["token_logprobs"]
    continued = list(prompt)
    for _ in range(12):
        continued.append(greedy_token(continued))
    echoed = server.complete(prompt=continued, max_tokens=0, logprobs=1, echo=True)["choices"][0]["logprobs"][
        "token_logprobs"
    ]
    assert echoed[-12:] == reported


def test_tokens_that_look_alike_keep_the_likelier_value(server: LiveServer) -> None:
    body = {"prompt": "a", "max_tokens": 1, "logprobs": 5, "logit_bias": {str(FIRST_BYTE + 0xC3): 100}}
    lists = server.complete(**body)["choices"][0]["logprobs"]
    assert lists["tokens"] == ["\ufffd"]
    assert lists["top_logprobs"][0]["\ufffd"] >= lists["token_logprobs"][0]


def test_a_sampled_token_does_not_hide_a_likelier_one_that_looks_like_it() -> None:
    """lm-eval compares the sampled value with the largest: hidden, it would call the sampled token the greedy
    one."""
    tokenizer = fake_tokenizer()
    writer = LegacyLogprobs(tokenizer, token_namer(tokenizer, False), 2, frozenset())
    top = [(FIRST_BYTE + 0xC3, -0.5), (FIRST_TEXT + 1, -1.0)]
    lists = writer.generated([TokenLogprobs(FIRST_BYTE + 0xC4, -5.0, top)], all_alternatives=False)
    assert lists["top_logprobs"] == [{"\ufffd": -0.5, "a": -1.0}]
    assert lists["token_logprobs"] == [-5.0]


def test_entries_end_with_the_token_that_completed_the_stop_string(server: LiveServer) -> None:
    body = {"prompt": "Hello", "max_tokens": 30, "temperature": 0, "logprobs": 0}
    text = server.complete(**body)["choices"][0]["text"]
    answer = server.complete(**body, stop=[text[8:11]])
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"] < 30


def test_chat_entries_hold_the_raw_bytes_of_each_token(server: LiveServer) -> None:
    body = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    choice = server.chat(**body)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert len(entries) == 40
    assert (
        bytes(byte for entry in entries for byte in entry["bytes"]).decode() == choice["message"]["content"]
    )
    assert all(len(entry["top_logprobs"]) == 3 for entry in entries)
    assert [0xC3] in [entry["bytes"] for entry in entries]
    chunks = chunks_of(server, CHAT, body)
    streamed = [
        entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == entries


def test_chat_logprobs_without_alternatives(server: LiveServer) -> None:
    choice = server.chat(messages=MESSAGES, max_tokens=2, logprobs=True)["choices"][0]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], []]
    assert server.chat(messages=MESSAGES, max_tokens=2)["choices"][0]["logprobs"] is None


def test_an_impossible_token_is_a_finite_number() -> None:
    assert wire_logprob(float("-inf")) == -9999.0
    assert wire_logprob(-3.5) == -3.5
