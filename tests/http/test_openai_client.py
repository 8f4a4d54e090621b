"""The official Python client, unchanged, against the real server."""

from collections.abc import Iterator

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
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=5)
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
    stream = client.completions.create(model=MODEL, prompt="Hello", max_tokens=30, temperature=1, seed=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=30, temperature=1, seed=5)
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
