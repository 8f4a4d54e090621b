"""langchain-openai, unchanged: chats, completions, tools, each way to structured output, embeddings,
responses, errors."""

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.http.clients import texts
from tests.http.clients.adapters import KEY, MODEL, need
from tests.http.live_server import LiveServer
from tests.http.tool_requests import SCHEMA

USER = [("user", "Weather?")]
PATHS = {False: "invoke", True: "stream"}


class Place(BaseModel):
    """Where and for how long."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


@pytest.fixture(scope="module")
def langchain_openai() -> Any:
    need("langchain_openai")
    import langchain_openai

    return langchain_openai


def chat(
    library: Any, server: LiveServer, seed: int | None = texts.RANDOM, *, key: str = KEY, **options: Any
) -> Any:
    common = {"model": MODEL, "base_url": f"{server.url}/v1", "api_key": key, "max_retries": 0}
    return library.ChatOpenAI(**{**common, "temperature": 1, "seed": seed, **options})


def answered(model: Any, streamed: bool, messages: Any = USER) -> Any:
    """The message; of a stream the sum of its chunks, as its users add them up."""
    if not streamed:
        return model.invoke(messages)
    first, *rest = model.stream(messages)
    for chunk in rest:
        first = first + chunk
    return first


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_chat(langchain_openai: Any, wire: LiveServer, streamed: bool) -> None:
    model = chat(langchain_openai, wire, max_tokens=9, logprobs=True, top_logprobs=2, stream_usage=True)
    message = answered(model, streamed, [("system", "Be brief."), ("user", "Hi"), ("user", "Weather?")])
    body = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            *({"role": "user", "content": t} for t in ("Hi", "Weather?")),
        ]
    }
    raw = wire.chat(**body, max_tokens=9, logprobs=True, top_logprobs=2, temperature=1, seed=texts.RANDOM)
    choice = raw["choices"][0]
    assert message.content == choice["message"]["content"]
    assert message.response_metadata["finish_reason"] == choice["finish_reason"] == "length"
    assert message.response_metadata["model_name"] == MODEL
    assert message.response_metadata["logprobs"]["content"] == choice["logprobs"]["content"]
    assert message.usage_metadata["output_tokens"] == 9
    assert message.usage_metadata["input_tokens"] == raw["usage"]["prompt_tokens"]
    assert message.id


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_tools_and_the_turn_after_them(langchain_openai: Any, wire: LiveServer, streamed: bool) -> None:
    functions = [
        {"name": "get_weather", "description": "The weather of a city.", "parameters": SCHEMA},
        {"name": "get_time", "description": "Now.", "parameters": {"type": "object", "properties": {}}},
    ]
    message = answered(chat(langchain_openai, wire, texts.TWO_CALLS).bind_tools(functions), streamed)
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [
        ("get_weather", json.loads(texts.ARGUMENTS)),
        ("get_time", {}),
    ]
    assert message.content == "Let me see."
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in message.tool_calls
    ]
    last = answered(
        chat(langchain_openai, wire, texts.PLAIN).bind_tools(functions),
        streamed,
        [{"role": "user", "content": "x"}, message, *results],
    )
    assert last.content == texts.TEXTS[texts.PLAIN]
    for choice in ("any", "get_weather"):
        forced = chat(langchain_openai, wire).bind_tools(
            functions, tool_choice=choice, parallel_tool_calls=False
        )
        (call,) = answered(forced, streamed).tool_calls
        assert call["name"] in ("get_weather", "get_time")
        assert choice == "any" or call["args"]["city"] in ("Paris", "Rome")


# Of OpenAI's client, whose model of a chunk is given the parsed value.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("method", "seed"),
    [("json_schema", texts.RANDOM), ("function_calling", texts.RANDOM), ("json_mode", texts.JSON)],
)
def test_structured_output(
    langchain_openai: Any, wire: LiveServer, method: str, seed: int, streamed: bool
) -> None:
    model = chat(langchain_openai, wire, seed).with_structured_output(Place, method=method)
    place = list(model.stream(USER))[-1] if streamed else model.invoke(USER)
    assert isinstance(place, Place)


def test_completions_in_batches(langchain_openai: Any, wire: LiveServer) -> None:
    """It takes the choices of several prompts by their place, and joins streams itself."""
    options = {
        "model": MODEL,
        "base_url": f"{wire.url}/v1",
        "api_key": KEY,
        "max_retries": 0,
        "temperature": 1,
        "max_tokens": 8,
    }
    model = langchain_openai.OpenAI(**options, seed=texts.RANDOM, n=2, best_of=2)
    prompts = ["Hello", "World"]
    raw = wire.complete(prompt=prompts, n=2, best_of=2, temperature=1, max_tokens=8, seed=texts.RANDOM)
    result = model.generate(prompts)
    assert [[one.text for one in found] for found in result.generations] == [
        [choice["text"] for choice in raw["choices"][start : start + 2]] for start in (0, 2)
    ]
    assert result.llm_output["token_usage"]["completion_tokens"] == 4 * 8
    single = langchain_openai.OpenAI(**options, seed=texts.RANDOM)
    assert "".join(single.stream("Hello")) == single.invoke("Hello") != ""


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_responses(langchain_openai: Any, wire: LiveServer, streamed: bool) -> None:
    model = chat(langchain_openai, wire, use_responses_api=True, max_tokens=30, seed=None, temperature=0)
    message = answered(model, streamed)
    raw = wire.chat(messages=[{"role": "user", "content": "Weather?"}], max_tokens=30, temperature=0)
    assert message.text == raw["choices"][0]["message"]["content"]
    assert message.usage_metadata["output_tokens"] == 30


def test_embeddings(langchain_openai: Any, wire: LiveServer) -> None:
    """By default it sends ids of OpenAI's own vocabulary, which no other model can read; with this option it
    sends text."""
    model = langchain_openai.OpenAIEmbeddings(
        model=MODEL, base_url=f"{wire.url}/v1", api_key=KEY, check_embedding_ctx_length=False, max_retries=0
    )
    inputs = ["Hello", "World"]
    raw = wire.post("/v1/embeddings", {"input": inputs}).json()["data"]
    assert model.embed_documents(inputs) == [pytest.approx(item["embedding"], abs=1e-6) for item in raw]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_errors(
    langchain_openai: Any, wire: LiveServer, busy: LiveServer, loading: LiveServer, streamed: bool
) -> None:
    import openai
    from langchain_core.exceptions import ContextOverflowError

    def refused(server: LiveServer, kind: type[Exception], messages: Any = USER, **options: Any) -> None:
        with pytest.raises(kind):
            answered(chat(langchain_openai, server, **options), streamed, messages)

    refused(wire, openai.AuthenticationError, key="wrong")
    refused(wire, openai.NotFoundError, model="gpt-x")
    refused(wire, openai.BadRequestError, temperature=3)
    refused(wire, ContextOverflowError, [("user", "a" * 1600)])
    refused(busy, openai.RateLimitError)
    refused(loading, openai.InternalServerError)
    refused(wire, openai.APIError, seed=texts.FAILING)
