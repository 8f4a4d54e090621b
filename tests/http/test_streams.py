"""Server-sent events: framing byte by byte, the order of chunks, usage, stop strings, equality with the
unstreamed answer."""

import json
from typing import Any

import pytest

from server.api.generation import endpoint, event_stream
from tests.fakes import BOS, EOS, FIRST_BYTE, HANG, VOCAB_SIZE, FakeRunner, fake_engine_factory
from tests.http.live_server import LiveServer, live_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
PROMPT = "1, 2, 3, 4, 5,"
STREAM_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def chunks_of(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream whose framing is checked on the raw bytes."""
    response = server.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    raw = response.content
    assert raw.endswith(b"\n\ndata: [DONE]\n\n")
    events = raw.decode("utf-8").split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") and "\n" not in event for event in events[:-2])
    chunks: list[dict[str, Any]] = [json.loads(event[len("data: ") :]) for event in events[:-2]]
    for field in ("id", "created", "model", "object", "system_fingerprint"):
        assert len({chunk[field] for chunk in chunks}) == 1
    return chunks


def joined(path: str, chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    if path == COMPLETIONS:
        return "".join(choice["text"] for choice in choices)
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_stream_headers(server: LiveServer) -> None:
    response = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers


def test_completion_chunks_are_one_per_token_and_the_last_one_alone_has_the_reason(
    server: LiveServer,
) -> None:
    chunks = chunks_of(server, COMPLETIONS, {"prompt": PROMPT, "max_tokens": 5, "temperature": 0})
    assert all(chunk["object"] == "text_completion" and "usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
    assert all(choice["text"] for choice in choices[:-1])


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_chat_chunks_begin_with_the_role_and_end_with_an_empty_delta(
    server: LiveServer, max_tokens: int
) -> None:
    chunks = chunks_of(
        server, CHAT, {"messages": MESSAGES, "max_tokens": max_tokens, "temperature": 1, "seed": 3}
    )
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(
        set(choice["delta"]) == {"content"} and choice["finish_reason"] is None for choice in choices[1:-1]
    )
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "length")
    assert len(choices) == max_tokens + 2


def test_an_answer_whose_first_token_is_the_end_is_a_complete_stream(server: LiveServer) -> None:
    chunks = chunks_of(server, CHAT, {"messages": MESSAGES, "logit_bias": {str(EOS): 100}, **STREAM_USAGE})
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {},
    ]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == 1
    whole = server.chat(messages=MESSAGES, logit_bias={str(EOS): 100})
    assert whole["choices"][0]["message"]["content"] == ""
    assert whole["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "options",
    [{}, {"stream_options": None}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}],
)
def test_usage_is_sent_only_when_asked_for(server: LiveServer, options: dict[str, Any]) -> None:
    chunks = chunks_of(server, COMPLETIONS, {"prompt": PROMPT, **options})
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("stop", [None, "e"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_comes_once_at_the_end_and_equals_the_unstreamed_one(
    server: LiveServer, path: str, n: int, stop: str | None
) -> None:
    body: dict[str, Any] = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": MESSAGES}
    body |= {"max_tokens": 30, "temperature": 1, "seed": 11, "n": n, "stop": stop}
    chunks = chunks_of(server, path, {**body, **STREAM_USAGE})
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    usage, whole = chunks[-1]["usage"], server.post(path, body).json()["usage"]
    del (
        usage["prompt_tokens_details"],
        whole["prompt_tokens_details"],
    )  # the second run finds the first one's prefix
    assert usage == whole


def test_continuous_usage_grows_with_every_chunk(server: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(server, COMPLETIONS, {"prompt": PROMPT, "max_tokens": 6, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_joined_deltas_are_the_unstreamed_text(server: LiveServer, path: str, seed: int) -> None:
    body: dict[str, Any] = (
        {"prompt": [BOS, 400, 401 + seed]} if path == COMPLETIONS else {"messages": MESSAGES}
    )
    body |= {"max_tokens": 60 + seed, "temperature": seed % 2, "seed": seed}
    whole = server.post(path, body).json()["choices"][0]
    text = whole["text"] if path == COMPLETIONS else whole["message"]["content"]
    assert joined(path, chunks_of(server, path, body)) == text
    assert len(text) > 30


def test_a_character_cut_in_half_is_flushed_as_a_replacement_character(server: LiveServer) -> None:
    body = {"prompt": "a", "max_tokens": 1, "logit_bias": {str(FIRST_BYTE + 0xC3): 100}}
    assert server.complete(**body)["choices"][0]["text"] == "\ufffd"
    assert joined(COMPLETIONS, chunks_of(server, COMPLETIONS, body)) == "\ufffd"


def _stops(text: str) -> list[list[str]]:
    return [
        [text[9:12]],
        [text[5:6]],
        [text[20:22], text[20:25]],
        ["zzzz not there"],
        [text[30:31], text[12:20]],
        [PROMPT[-1] + text[:1]],
    ]


@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_text_ends_before_the_first_stop_string_streamed_or_not(
    server: LiveServer, path: str, which: int
) -> None:
    body: dict[str, Any] = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": MESSAGES}
    body |= {"max_tokens": 40, "temperature": 0}
    full = joined(path, chunks_of(server, path, body))
    stop = _stops(full)[which]
    ends = [full.find(text) + len(text) for text in stop if text in full]
    expected = full
    if ends:
        first = next(
            text for text in stop if full.find(text) >= 0 and full.find(text) + len(text) == min(ends)
        )
        expected = full[: full.find(first)]
    chunks = chunks_of(server, path, {**body, "stop": stop, **STREAM_USAGE})
    assert joined(path, chunks) == expected
    assert chunks[-2]["choices"][0]["finish_reason"] == ("stop" if ends else "length")
    whole = server.post(path, {**body, "stop": stop}).json()
    choice = whole["choices"][0]
    assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == expected
    assert whole["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"]
    assert (whole["usage"]["completion_tokens"] < 40) == bool(ends)


def test_several_prompts_and_choices_interleave_and_each_equals_its_own_run(server: LiveServer) -> None:
    prompts = ["Hello", "World", "Again"]
    body = {"prompt": prompts, "n": 2, "max_tokens": 10, "temperature": 1, "seed": 4}
    whole = server.complete(**body)
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    chunks = chunks_of(server, COMPLETIONS, {**body, **STREAM_USAGE})
    assert all(len(chunk["choices"]) == 1 for chunk in chunks[:-1])
    for choice in whole["choices"]:
        assert joined(COMPLETIONS, chunks, choice["index"]) == choice["text"]
    for index, prompt in enumerate(prompts):
        alone = server.complete(**{**body, "prompt": prompt})["choices"]
        assert [choice["text"] for choice in alone] == [
            choice["text"] for choice in whole["choices"][2 * index : 2 * index + 2]
        ]
        assert alone[0]["text"] != alone[1]["text"]
    assert whole["usage"]["prompt_tokens"] == sum(len(prompt) + 1 for prompt in prompts)
    assert whole["usage"]["completion_tokens"] == 60 == chunks[-1]["usage"]["completion_tokens"]


def test_greedy_choices_are_equal_and_computed_once(server: LiveServer) -> None:
    before = server.metric("prompt_tokens_total")
    answer = server.complete(prompt="Hello", n=3, max_tokens=5, temperature=0)
    assert len({choice["text"] for choice in answer["choices"]}) == 1
    assert answer["usage"]["completion_tokens"] == 15
    assert server.metric("prompt_tokens_total") - before == answer["usage"]["prompt_tokens"]


def test_min_tokens_and_ignore_eos_put_the_end_off(server: LiveServer) -> None:
    body = {"prompt": "Hello", "max_tokens": 9, "temperature": 0, "logit_bias": {str(EOS): 100}}
    assert server.complete(**body)["usage"]["completion_tokens"] == 1
    answer = server.complete(**body, min_tokens=4)
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (5, "stop")
    ignored = server.complete(**body, ignore_eos=True)
    assert (ignored["usage"]["completion_tokens"], ignored["choices"][0]["finish_reason"]) == (9, "length")
    assert ignored["choices"][0]["text"] == ""


def test_a_stop_token_of_the_request_ends_the_text_without_being_shown(server: LiveServer) -> None:
    body = {"prompt": "Hello", "max_tokens": 9, "logit_bias": {str(VOCAB_SIZE - 1): 100}}
    answer = server.complete(**body, stop_token_ids=[VOCAB_SIZE - 1])
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1


def test_errors_before_the_first_token_are_plain_http_errors(server: LiveServer) -> None:
    response = server.post(COMPLETIONS, {"prompt": "a", "stream": True, "temperature": 9})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"


def test_an_idle_stream_says_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_SECONDS", 0.05)
    monkeypatch.setattr(endpoint, "KEEP_ALIVE_SECONDS", 0.05)
    runner = FakeRunner()
    body = {"prompt": [BOS, HANG], "max_tokens": 2, "stream": True}  # held up at its first token
    with (
        live_server(fake_engine_factory(runner)) as slow,
        slow.client.stream("POST", COMPLETIONS, json=body) as response,
    ):
        parts = response.iter_raw()
        raw = next(parts)
        runner.released.set()
        raw += b"".join(parts)
    assert raw.startswith(b": keep-alive\n\n")
    assert raw.count(b"data: {") == 3
    assert raw.endswith(b"data: [DONE]\n\n")


def test_the_models_own_sampling_defaults_hold_and_are_shown() -> None:
    with live_server(fake_engine_factory(default_sampling={"top_k": 1, "top_p": 0.95})) as other:
        body = {"prompt": "Hello", "max_tokens": 8}
        assert other.complete(**body, seed=1)["choices"] == other.complete(**body, seed=2)["choices"]
        assert (
            other.complete(**body, seed=1, top_k=0)["choices"]
            != other.complete(**body, seed=2, top_k=0)["choices"]
        )
        card = other.client.get("/v1/models").json()["data"][0]
        assert card["default_sampling"] == {"temperature": 1.0, "top_p": 0.95, "top_k": 1}
