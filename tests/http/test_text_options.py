"""Parameters that decide what is shown of a prompt and of the generated tokens; token ids beside the text."""

from typing import Any

import pytest

from tests.fakes import BOS, EOS, FIRST_BYTE, FIRST_TEXT, START_OF_TURN, fake_tokenizer, greedy_token
from tests.http.live_server import LiveServer
from tests.http.test_streams import CHAT, COMPLETIONS, MESSAGES, chunks_of, joined

PROMPT_IDS = [BOS, *range(FIRST_TEXT + 1, FIRST_TEXT + 9)]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 30}
TOKENIZER = fake_tokenizer()


def both_ways(server: LiveServer, path: str, body: dict[str, Any]) -> tuple[str, str]:
    """Text and finish reason, the same streamed and not."""
    whole = server.complete(**body) if path == COMPLETIONS else server.chat(**body)
    choice = whole["choices"][0]
    text: str = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    chunks = chunks_of(server, path, body)
    assert joined(path, chunks) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    return text, choice["finish_reason"]


def forced(token_id: int) -> dict[str, Any]:
    return {"logit_bias": {str(token_id): 100}, "max_tokens": 3}


# -- include_stop_str_in_output ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "source"), [(COMPLETIONS, {"prompt": "Hello"}), (CHAT, {"messages": MESSAGES})]
)
def test_the_stop_string_is_shown_when_asked_for(
    server: LiveServer, path: str, source: dict[str, Any]
) -> None:
    whole, _ = both_ways(server, path, {**source, **GREEDY})
    stop = whole[9:12]
    without, reason = both_ways(server, path, {**source, **GREEDY, "stop": stop})
    assert (without + stop, reason) == (whole[: whole.index(stop) + 3], "stop")
    shown = both_ways(server, path, {**source, **GREEDY, "stop": stop, "include_stop_str_in_output": True})
    assert shown == (without + stop, "stop")


def test_a_stop_token_with_a_text_is_shown_too_and_an_end_token_has_none(server: LiveServer) -> None:
    token_id = FIRST_TEXT + 1
    stopped = {"prompt": "Hello", **forced(token_id), "stop_token_ids": [token_id]}
    assert both_ways(server, COMPLETIONS, stopped) == ("", "stop")
    assert both_ways(server, COMPLETIONS, {**stopped, "include_stop_str_in_output": True}) == ("a", "stop")
    for path, source in ((COMPLETIONS, {"prompt": "Hello"}), (CHAT, {"messages": MESSAGES})):
        ended = {**source, **forced(EOS), "include_stop_str_in_output": True}
        assert both_ways(server, path, ended) == ("", "stop")
        assert both_ways(server, path, {**ended, "skip_special_tokens": False}) == ("<eos>", "stop")


# -- skip_special_tokens -------------------------------------------------------------------------------------


def test_control_tokens_are_shown_as_their_literals_when_asked_for(server: LiveServer) -> None:
    for path, source in ((COMPLETIONS, {"prompt": "Hello"}), (CHAT, {"messages": MESSAGES})):
        body = {**source, **forced(START_OF_TURN)}
        assert both_ways(server, path, body) == ("", "length")
        assert both_ways(server, path, {**body, "skip_special_tokens": True}) == ("", "length")
        assert both_ways(server, path, {**body, "skip_special_tokens": False}) == (
            "<start_of_turn>" * 3,
            "length",
        )
    stopped = {"prompt": "Hello", **forced(START_OF_TURN), "skip_special_tokens": False, "stop": "of_"}
    assert both_ways(server, COMPLETIONS, stopped) == ("<start_", "stop")


def test_offsets_count_the_literals_that_are_shown(server: LiveServer) -> None:
    body = {"prompt": PROMPT_IDS[:3], **forced(START_OF_TURN), "logprobs": 0, "echo": True}
    hidden = server.complete(**body)["choices"][0]
    assert hidden["text"] == "ab"
    assert hidden["logprobs"]["text_offset"] == [0, 0, 1, 2, 2, 2]
    shown = server.complete(**body, skip_special_tokens=False)["choices"][0]
    assert shown["text"] == "<bos>ab" + "<start_of_turn>" * 3
    for token, offset in zip(shown["logprobs"]["tokens"], shown["logprobs"]["text_offset"], strict=True):
        assert shown["text"][offset:].startswith(token)


# -- truncate_prompt_tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "limit", "kept"),
    [
        (PROMPT_IDS, 4, [BOS, *PROMPT_IDS[-3:]]),
        (PROMPT_IDS[1:], 4, PROMPT_IDS[-4:]),
        (PROMPT_IDS, 1, PROMPT_IDS[-1:]),
        (PROMPT_IDS, 9, PROMPT_IDS),
        (PROMPT_IDS, 10**9, PROMPT_IDS),
        ("abcdefgh", 4, [BOS, *PROMPT_IDS[-3:]]),
        ("abcdefgh", -1, PROMPT_IDS),
    ],
)
def test_the_end_of_the_prompt_is_kept_and_its_bos(
    server: LiveServer, prompt: Any, limit: int, kept: list[int]
) -> None:
    body = {
        "prompt": prompt,
        "truncate_prompt_tokens": limit,
        "max_tokens": 4,
        "temperature": 0,
        "return_token_ids": True,
    }
    answer = server.complete(**body)
    assert answer["choices"][0]["prompt_token_ids"] == kept
    assert answer["usage"]["prompt_tokens"] == len(kept)
    assert (
        answer["choices"][0]["text"]
        == server.complete(prompt=kept, max_tokens=4, temperature=0)["choices"][0]["text"]
    )


@pytest.mark.parametrize("prompt", ["abcdefgh", PROMPT_IDS])
def test_echo_shows_what_was_kept(server: LiveServer, prompt: Any) -> None:
    body = {"prompt": prompt, "truncate_prompt_tokens": 4, "max_tokens": 0, "echo": True, "logprobs": 0}
    choice = server.complete(**body)["choices"][0]
    assert choice["text"] == "fgh"
    assert choice["logprobs"]["tokens"] == ["<bos>", "f", "g", "h"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]


def test_minus_one_leaves_room_for_the_answer(server: LiveServer) -> None:
    long = "a" * 600
    assert server.refused(COMPLETIONS, {"prompt": long})["code"] == "context_length_exceeded"
    answer = server.complete(prompt=long, truncate_prompt_tokens=-1, max_tokens=100)
    assert answer["usage"]["prompt_tokens"] == 512 - 100
    assert answer["usage"]["completion_tokens"] == 100
    assert server.complete(prompt=long, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 512 - 16
    assert (
        server.refused(COMPLETIONS, {"prompt": long, "truncate_prompt_tokens": 512})["code"]
        == "context_length_exceeded"
    )
    chat = server.chat(messages=[{"role": "user", "content": long}], truncate_prompt_tokens=-1)
    assert (chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"]) == (511, 1)
    cut = server.chat(messages=MESSAGES, truncate_prompt_tokens=5, max_tokens=1, return_token_ids=True)
    whole = server.chat(messages=MESSAGES, max_tokens=1, return_token_ids=True)["prompt_token_ids"]
    assert cut["prompt_token_ids"] == [BOS, *whole[-4:]]


# -- return_token_ids ----------------------------------------------------------------------------------------


def greedy_ids(prefix: list[int], count: int) -> list[int]:
    tokens = list(prefix)
    for _ in range(count):
        tokens.append(greedy_token(tokens))
    return tokens[len(prefix) :]


def test_token_ids_of_completions(server: LiveServer) -> None:
    prompts = [PROMPT_IDS, PROMPT_IDS[:4]]
    body = {"prompt": prompts, "n": 2, **GREEDY, "return_token_ids": True}
    choices = server.complete(**body)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert [choice["token_ids"] for choice in choices] == [
        greedy_ids(prompt, 30) for prompt in prompts for _ in range(2)
    ]
    # Byte tokens are among them: a chunk comes for each token though its text is held back.
    assert any(FIRST_BYTE <= token_id < FIRST_TEXT for token_id in choices[0]["token_ids"])
    streamed = [chunk["choices"][0] for chunk in chunks_of(server, COMPLETIONS, body)]
    for choice in choices:
        own = [piece for piece in streamed if piece["index"] == choice["index"]]
        assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert all("prompt_token_ids" not in piece for piece in own[1:])
        assert [len(piece["token_ids"]) for piece in own] == [1] * 30 + [0]
        assert [token_id for piece in own for token_id in piece["token_ids"]] == choice["token_ids"]


def test_token_ids_of_chats(server: LiveServer) -> None:
    body = {
        "messages": MESSAGES,
        "n": 2,
        "max_tokens": 30,
        "temperature": 1,
        "seed": 4,
        "return_token_ids": True,
    }
    answer = server.chat(**body)
    assert answer["prompt_token_ids"][0] == BOS
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    for choice in answer["choices"]:
        assert TOKENIZER.decode(choice["token_ids"]) == choice["message"]["content"]
    chunks = chunks_of(server, CHAT, body)
    for choice in answer["choices"]:
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert own[0]["prompt_token_ids"] == answer["prompt_token_ids"]
        assert all("prompt_token_ids" not in chunk for chunk in own[1:])
        assert [token_id for chunk in own for token_id in chunk["choices"][0]["token_ids"]] == choice[
            "token_ids"
        ]


def test_the_ids_are_those_that_count(server: LiveServer) -> None:
    ended = server.complete(prompt="Hello", **forced(EOS), return_token_ids=True)
    assert (ended["choices"][0]["text"], ended["choices"][0]["token_ids"]) == ("", [EOS])
    stop = server.complete(prompt="Hello", **GREEDY)["choices"][0]["text"][8:11]
    stopped = server.complete(prompt="Hello", **GREEDY, stop=stop, return_token_ids=True)
    assert len(stopped["choices"][0]["token_ids"]) == stopped["usage"]["completion_tokens"] < 30
    scored = server.complete(prompt="Hello", max_tokens=0, return_token_ids=True)["choices"][0]
    assert (scored["token_ids"], len(scored["prompt_token_ids"])) == ([], 6)
    (only,) = chunks_of(server, COMPLETIONS, {"prompt": "Hello", "max_tokens": 0, "return_token_ids": True})
    assert only["choices"][0]["prompt_token_ids"] == scored["prompt_token_ids"]


def test_no_ids_are_sent_unless_asked_for(server: LiveServer) -> None:
    for body in ({}, {"return_token_ids": None}, {"return_token_ids": False}):
        assert set(server.complete(prompt="Hello", max_tokens=1, **body)["choices"][0]) == {
            "index",
            "text",
            "logprobs",
            "finish_reason",
        }
        assert "prompt_token_ids" not in server.chat(messages=MESSAGES, max_tokens=1, **body)


# -- suffix --------------------------------------------------------------------------------------------------


def test_a_suffix_is_refused_with_the_reason(server: LiveServer) -> None:
    error = server.refused(COMPLETIONS, {"prompt": "def f(", "suffix": "return 1"})
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
    assert "not trained to fill in the middle" in error["message"]
