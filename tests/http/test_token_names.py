"""``return_tokens_as_token_ids``: tokens in lists of log-probabilities are called by their ids, which are
unique, as in vLLM."""

import json
from typing import Any

import pytest

from tests.fakes import BOS
from tests.http.live_server import LiveServer

HELLO = [{"role": "user", "content": "Hello"}]


def named(token_ids: list[int]) -> list[str]:
    return [f"token_id:{token_id}" for token_id in token_ids]


@pytest.mark.parametrize("stream", [False, True])
def test_in_completions(server: LiveServer, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 6, "temperature": 0, "logprobs": 2, "echo": True}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    plain = server.complete(**{**body, "return_tokens_as_token_ids": False})["choices"][0]["logprobs"]
    if stream:
        lines = server.post("/v1/completions", {**body, "stream": True}).text.split("\n\n")[:-2]
        pieces = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    else:
        pieces = server.complete(**body)["choices"]
    lists = {name: [item for piece in pieces for item in piece["logprobs"][name]] for name in plain}
    token_ids = pieces[0]["prompt_token_ids"] + [token for piece in pieces for token in piece["token_ids"]]
    assert token_ids[0] == BOS
    assert lists["tokens"] == named(token_ids)
    # Nothing else changes: values, offsets, and the sampled token among the alternatives.
    assert lists["token_logprobs"] == plain["token_logprobs"]
    assert lists["text_offset"] == plain["text_offset"]
    for name, value, top in zip(
        lists["tokens"][1:], lists["token_logprobs"][1:], lists["top_logprobs"][1:], strict=True
    ):
        assert top[name] == value
        assert all(key.startswith("token_id:") for key in top)


def test_in_chats(server: LiveServer) -> None:
    body = {"messages": HELLO, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    plain = server.chat(**body)["choices"][0]
    choice = server.chat(**body, return_token_ids=True, return_tokens_as_token_ids=True)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == named(choice["token_ids"])
    assert [entry["bytes"] for entry in entries] == [entry["bytes"] for entry in plain["logprobs"]["content"]]
    assert all(top["token"].startswith("token_id:") for entry in entries for top in entry["top_logprobs"])
    assert choice["message"] == plain["message"]


def test_without_logprobs_it_changes_nothing(server: LiveServer) -> None:
    answer = server.complete(prompt="Hello", max_tokens=3, temperature=0, return_tokens_as_token_ids=True)
    assert answer["choices"][0]["logprobs"] is None
