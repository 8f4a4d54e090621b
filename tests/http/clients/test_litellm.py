"""What litellm has beyond the two generation endpoints: embeddings, responses, Anthropic's messages,
asynchronous calls."""

import asyncio
from typing import Any

import pytest

from tests.http.clients import texts
from tests.http.clients.adapters import KEY, MODEL, LiteLLM
from tests.http.live_server import LiveServer

USER = [{"role": "user", "content": "Weather?"}]


@pytest.fixture(scope="module")
def litellm() -> Any:
    LiteLLM()
    import litellm

    return litellm


def test_embeddings(litellm: Any, wire: LiveServer) -> None:
    inputs = ["Hello", "World"]
    found = litellm.embedding(model=f"openai/{MODEL}", input=inputs, api_base=f"{wire.url}/v1", api_key=KEY)
    raw = wire.post("/v1/embeddings", {"input": inputs}).json()
    assert [item["embedding"] for item in found.data] == [
        pytest.approx(item["embedding"], abs=1e-6) for item in raw["data"]
    ]
    assert found.usage.prompt_tokens == raw["usage"]["prompt_tokens"]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_responses(litellm: Any, wire: LiveServer, streamed: bool) -> None:
    options = {
        "model": f"openai/{MODEL}",
        "api_base": f"{wire.url}/v1",
        "api_key": KEY,
        "input": "Weather?",
        "temperature": 0,
    }
    answer = litellm.responses(**options, max_output_tokens=20, stream=streamed)
    if streamed:
        answer = list(answer)[-1].response
    raw = wire.chat(messages=USER, max_tokens=20, temperature=0)
    assert answer.output[0].content[0].text == raw["choices"][0]["message"]["content"]
    assert answer.usage.output_tokens == 20


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_chats_as_messages_of_anthropic(litellm: Any, wire: LiveServer, streamed: bool) -> None:
    options = {
        "model": f"anthropic/{MODEL}",
        "api_base": wire.url,
        "api_key": KEY,
        "messages": USER,
        "temperature": 0,
    }
    answer = litellm.completion(**options, max_tokens=20, stream=streamed)
    text = (
        "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        if streamed
        else answer.choices[0].message.content
    )
    raw = wire.chat(messages=USER, max_tokens=20, temperature=0)
    assert text == raw["choices"][0]["message"]["content"]


def test_many_at_once(litellm: Any, wire: LiveServer) -> None:
    options = {
        "model": f"openai/{MODEL}",
        "api_base": f"{wire.url}/v1",
        "api_key": KEY,
        "messages": USER,
        "temperature": 1,
    }

    async def all_of_them() -> list[str]:
        asked = (litellm.acompletion(**options, seed=texts.RANDOM + seed, max_tokens=9) for seed in range(4))
        return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

    expected = [
        wire.chat(messages=USER, temperature=1, seed=texts.RANDOM + seed, max_tokens=9)["choices"][0][
            "message"
        ]["content"]
        for seed in range(4)
    ]
    assert asyncio.run(all_of_them()) == expected
