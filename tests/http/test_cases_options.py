"""What peers got wrong about single parameters, where no other test shows that it is right here; the numbers
are those of the collected reports."""

import json
import re
import threading
from typing import Any

import pytest

from tests.fakes import BOS, FIRST_BYTE, VOCAB_SIZE
from tests.http.live_server import LiveServer, error_of
from tests.http.test_logprobs import LISTS, streamed_lists
from tests.http.test_streams import CHAT, COMPLETIONS, MESSAGES, chunks_of, joined

RARE = "\uad2d"  # three byte tokens


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_25_a_rare_character_that_is_forced_streams_whole(server: LiveServer, path: str) -> None:
    text = f"{RARE} " * 12
    body: dict[str, Any] = (
        {"prompt": "a"} if path == COMPLETIONS else {"messages": MESSAGES, "logprobs": True}
    )
    body |= {"guided_regex": f"({RARE} ){{12}}", "max_tokens": 100}
    chunks = chunks_of(server, path, body)
    assert joined(path, chunks) == text
    pieces = [
        choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
        for chunk in chunks
        for choice in chunk["choices"]
    ]
    assert "\ufffd" not in "".join(pieces)
    assert {piece for piece in pieces if piece} <= {RARE, " ", f"{RARE} ", f" {RARE}"}
    whole = server.post(path, body).json()["choices"][0]
    assert (whole["text"] if path == COMPLETIONS else whole["message"]["content"]) == text
    if path == CHAT:
        entries = whole["logprobs"]["content"]
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == text
        assert [entry["bytes"] for entry in entries[:3]] == [[byte] for byte in RARE.encode()]


BIASES = ["1000", "-100.5", "null", '"x"', "NaN", "true", "[1]", "{}", "1e999"]


def test_36_a_wrong_bias_is_refused_and_a_neighbour_streams_on(server: LiveServer) -> None:
    body = {"prompt": "Hello", "max_tokens": 150, "temperature": 1, "seed": 8}
    expected = server.complete(**body)["choices"][0]["text"]
    answers: list[str] = []
    neighbour = threading.Thread(
        target=lambda: answers.append(joined(COMPLETIONS, chunks_of(server, COMPLETIONS, body)))
    )
    neighbour.start()
    for value in BIASES:
        content = f'{{"prompt": "a", "logit_bias": {{"5": {value}}}}}'
        response = server.client.post(
            COMPLETIONS, content=content, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400, response.text
        error = error_of(response)
        assert value in ("NaN", "1e999") or error["param"] == "logit_bias.5"
    for key in (str(VOCAB_SIZE), "-1", "1.5", "abc", " 7"):
        assert server.refused(COMPLETIONS, {"prompt": "a", "logit_bias": {key: 1}})["param"].startswith(
            "logit_bias"
        )
    neighbour.join()
    assert answers == [expected]


def test_36_none_is_no_bias_and_the_extremes_force_and_ban(server: LiveServer) -> None:
    body = {"prompt": "Hello", "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    plain = server.complete(**body)["choices"][0]["token_ids"]
    for nothing in (None, {}, {str(VOCAB_SIZE - 1): 0}):
        assert server.complete(**body, logit_bias=nothing)["choices"][0]["token_ids"] == plain
    forced = server.complete(**body, logit_bias={str(VOCAB_SIZE - 1): 100})["choices"][0]["token_ids"]
    assert forced == [VOCAB_SIZE - 1] * 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "prompt",
    ["Your answer: Yes", [BOS, 400, 401, 402], ["Yes", "Your answer: No"], [[BOS, 400], [BOS, FIRST_BYTE]]],
    ids=str,
)
def test_38_scoring_calls_of_every_form(server: LiveServer, prompt: Any, stream: bool) -> None:
    body = {"prompt": prompt, "max_tokens": 0, "logprobs": 1, "echo": True}
    whole = server.complete(**body)
    assert whole["usage"]["completion_tokens"] == 0
    assert len(whole["choices"]) == (
        len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    )
    for choice in whole["choices"]:
        assert choice["finish_reason"] == "length"
        lists = choice["logprobs"]
        assert len({len(lists[name]) for name in LISTS}) == 1
        assert (lists["token_logprobs"][0], lists["top_logprobs"][0]) == (None, None)
        assert all(value is not None and value <= 0 for value in lists["token_logprobs"][1:])
    if isinstance(prompt, str):
        assert whole["choices"][0]["text"] == prompt
    if stream:
        if len(whole["choices"]) == 1:
            assert streamed_lists(server, body) == whole["choices"][0]["logprobs"]
        chunks = chunks_of(server, COMPLETIONS, body)
        for choice in whole["choices"]:
            assert joined(COMPLETIONS, chunks, choice["index"]) == choice["text"]


def test_40_temperature_zero_wins_over_top_p_and_small_ones_are_finite(server: LiveServer) -> None:
    body = {"prompt": "Hello", "max_tokens": 20, "seed": 4}
    greedy = server.complete(**body, temperature=0)["choices"]
    assert server.complete(**body, temperature=0.0, top_p=0.5)["choices"] == greedy
    assert (
        server.complete(**body, temperature=None)["choices"]
        == server.complete(**body, temperature=1)["choices"]
    )
    small = server.complete(**body, temperature=1e-3, logprobs=1)["choices"][0]
    assert all(-10_000 < value <= 0 for value in small["logprobs"]["token_logprobs"])


def test_42_a_seed_beyond_the_range_harms_no_neighbour(server: LiveServer) -> None:
    body = {"prompt": "Hello", "max_tokens": 100, "temperature": 1}
    expected = server.complete(**body, seed=2**63 - 1)["choices"]
    answers: list[Any] = []
    neighbour = threading.Thread(
        target=lambda: answers.append(server.complete(**body, seed=2**63 - 1)["choices"])
    )
    neighbour.start()
    for seed in (2**63, 2**64, -(2**63) - 1):
        assert server.refused(COMPLETIONS, {**body, "seed": seed})["param"] == "seed"
    neighbour.join()
    assert answers == [expected]
    drawn = {
        json.dumps(server.complete(**{**body, "max_tokens": 16}, seed=seed)["choices"])
        for seed in (0, 1, 2**32, 2**32 + 1, -1)
    }
    assert len(drawn) == 5


def test_47_an_empty_message_is_a_message(server: LiveServer) -> None:
    for content in ("", [{"type": "text", "text": ""}]):
        answer = server.chat(messages=[{"role": "user", "content": content}], max_tokens=2)
        assert answer["usage"]["completion_tokens"] == 2
    called = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "a", "content": ""},
    ]
    assert server.chat(messages=turns, max_tokens=2)["usage"]["completion_tokens"] == 2
    assert (
        server.refused(CHAT, {"messages": [*MESSAGES, {"role": "assistant", "content": None}]})["param"]
        == "messages[1].content"
    )


def test_52_a_small_document_has_no_blanks_and_completes(server: LiveServer) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 20}, "b": {"type": "integer"}},
    }
    body = {
        "temperature": 0,
        "max_tokens": 300,
        "guided_json": {**schema, "required": ["a", "b"], "additionalProperties": False},
    }
    reasons = set()
    for start in range(20):
        choice = server.complete(prompt=f"Answer {start}\n\n\n", **body)["choices"][0]
        reasons.add(choice["finish_reason"])
        assert not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*("|$)', "", choice["text"]))
        if choice["finish_reason"] == "stop":
            assert set(json.loads(choice["text"])) == {"a", "b"}
    assert "stop" in reasons
