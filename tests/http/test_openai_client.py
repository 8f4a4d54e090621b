"""The official Python client, unchanged, against the real server."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.http.live_server import LiveServer

MODEL = "fake-gemma"


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Hello", max_tokens=5, temperature=0, logprobs=1)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.choices[0].logprobs is not None
    assert answer._request_id


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=5
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    again = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": "Hi"},
            answer.choices[0].message.to_dict(),  # type: ignore[list-item]
            {"role": "user", "content": "And?"},
        ],
        max_completion_tokens=5,
    )
    assert again.usage is not None
    assert again.usage.prompt_tokens > (answer.usage.prompt_tokens if answer.usage else 0)


def test_streams_equal_the_answers_in_one_piece(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Hello", max_tokens=30, temperature=1, seed=5)
    stream = client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=30, temperature=1, seed=5, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
    chat = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=30, temperature=1, seed=5
    )
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=30,
            temperature=1,
            seed=5,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == chat.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 30


def test_errors_become_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-x", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="a", temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens"):
        client.completions.create(model=MODEL, prompt=[9] * 600)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_the_best_of_several_choices(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "prompt": "Hello",
        "max_tokens": 8,
        "temperature": 1,
        "seed": 3,
        "logprobs": 0,
    }
    drawn = client.completions.create(**options, n=5)
    best = client.completions.create(**options, best_of=5)

    def mean(choice: openai.types.CompletionChoice) -> float:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    assert best.choices[0].text == max(drawn.choices, key=mean).text
    assert best.usage is not None
    assert best.usage.completion_tokens == 40


def test_a_suffix_is_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="fill in the middle") as refused:
        client.completions.create(model=MODEL, prompt="a", suffix="b")
    assert (refused.value.param, refused.value.code) == ("suffix", "unsupported_parameter")


def test_extensions_go_through_extra_body(client: openai.OpenAI) -> None:
    extra = {"return_token_ids": True, "prompt_logprobs": 1, "truncate_prompt_tokens": 4}
    answer = client.completions.create(model=MODEL, prompt="Hello", max_tokens=3, extra_body=extra)
    fields = answer.choices[0].model_extra or {}
    assert len(fields["prompt_token_ids"]) == len(fields["prompt_logprobs"]) == 4
    assert len(fields["token_ids"]) == 3
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Good "}],
        max_tokens=3,
        extra_body={"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True},
    )
    assert len((chat.model_extra or {})["prompt_token_ids"]) == (
        chat.usage.prompt_tokens if chat.usage else 0
    )
    assert len((chat.choices[0].model_extra or {})["token_ids"]) == 3
    only_ids = {"return_token_ids": True}
    for piece in client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=3, stream=True, extra_body=only_ids
    ):
        assert "token_ids" in (piece.choices[0].model_extra or {})


def test_the_clients_request_id_is_the_answers_id(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Hello", max_tokens=1)
    assert answer._request_id == answer.id
    chosen = client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=1, extra_headers={"X-Request-Id": "mine"}
    )
    assert chosen._request_id == "mine"
    raw = client.completions.with_raw_response.create(model=MODEL, prompt="Hello", max_tokens=1)
    assert int(raw.headers["openai-processing-ms"]) >= 0


def test_fields_without_a_meaning_here_are_named_in_a_header(client: openai.OpenAI) -> None:
    extra = {"frobnicate": 1, "store": True}
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt="Hello", max_tokens=1, extra_body=extra
    )
    assert set(raw.headers["x-gemserve-ignored-parameters"].split(", ")) == set(extra)
