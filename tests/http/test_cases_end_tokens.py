"""Every end token of the model ends an answer, on both endpoints and streamed or not, and none of them is
ever shown."""

import json
from typing import Any

import pytest

from tests.fakes import END_OF_TURN, EOS
from tests.http.live_server import LiveServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def answer(server: LiveServer, path: str, stream: bool, **options: Any) -> tuple[str, str, int]:
    """Text, finish reason and completion tokens."""
    body = {"prompt": "Hello"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "Hi"}]}
    if not stream:
        whole = server.post(path, {**body, **options}).json()
        choice = whole["choices"][0]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        return text, choice["finish_reason"], whole["usage"]["completion_tokens"]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    events = server.post(path, {**body, **options, **usage}).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event[len("data: ") :]) for event in events[:-2]]
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    texts = [
        choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "") for choice in choices
    ]
    return "".join(texts), choices[-1]["finish_reason"], chunks[-1]["usage"]["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("token", [EOS, END_OF_TURN])
def test_every_end_token_stops_and_counts_and_min_tokens_puts_each_off(
    server: LiveServer, path: str, token: int, stream: bool
) -> None:
    options = {"max_tokens": 50, "temperature": 0, "logit_bias": {str(token): 100}}
    assert answer(server, path, stream, **options) == ("", "stop", 1)
    text, reason, count = answer(server, path, stream, **options, min_tokens=3)
    assert (reason, count) == ("stop", 4)
    assert text
    assert "<" not in text


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_name_of_an_end_token_as_stop_string_changes_nothing(server: LiveServer, path: str) -> None:
    options = {"max_tokens": 12, "temperature": 0}
    for stream in (False, True):
        assert answer(server, path, stream, **options, stop="<end_of_turn>") == answer(
            server, path, False, **options
        )


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_on_the_very_last_token_is_a_stop_not_the_limit(
    server: LiveServer, stream: bool
) -> None:
    full, _, _ = answer(server, COMPLETIONS, False, max_tokens=9, temperature=0)
    for length in range(1, 4):
        text, reason, count = answer(
            server, COMPLETIONS, stream, max_tokens=9, temperature=0, stop=full[-length:]
        )
        assert reason == "stop"
        assert text == full[: full.find(full[-length:])]
        assert count <= 9


def test_min_tokens_puts_off_stop_strings_too(server: LiveServer) -> None:
    full, _, _ = answer(server, COMPLETIONS, False, max_tokens=40, temperature=0)
    repeated = next(character for character in full if full.count(character) > 1 and character.isalpha())
    early = answer(server, COMPLETIONS, False, max_tokens=40, temperature=0, stop=repeated)
    late = answer(
        server, COMPLETIONS, False, max_tokens=40, temperature=0, stop=repeated, min_tokens=early[2]
    )
    assert early[2] < late[2]
    assert late[0].startswith(early[0] + repeated)
