"""Raw answers and every chunk of a stream validate against OpenAI's published schemas, and hold no field that
these do not name unless it was asked for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.fakes import BOS, EOS, POISON
from tests.http.live_server import LiveServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DOCUMENT = json.loads((Path(__file__).parent / "openai_schemas" / "schemas.json").read_text(encoding="utf-8"))
HELLO = [{"role": "user", "content": "Hello"}]
USAGE = {"stream_options": {"include_usage": True}}


def schema(value: Any, *, closed: bool) -> Any:
    """OpenAPI's ``nullable`` in the words of JSON Schema; closed: objects have no other properties than those
    named."""
    if isinstance(value, list):
        return [schema(item, closed=closed) for item in value]
    if not isinstance(value, dict):
        return value
    rest = {name: schema(item, closed=closed) for name, item in value.items() if name != "nullable"}
    if closed and isinstance(rest.get("properties"), dict):
        rest.setdefault("additionalProperties", False)
    return {"anyOf": [rest, {"type": "null"}]} if value.get("nullable") is True else rest


def validator(name: str, *, closed: bool = True, document: Any = DOCUMENT) -> jsonschema.Draft202012Validator:
    whole = {**schema(document, closed=closed), "$ref": f"#/components/schemas/{name}"}
    return jsonschema.Draft202012Validator(whole)


def changed(name: str, *path: str, **fields: Any) -> Any:
    """The document with other fields in one place of a component."""
    document = json.loads(json.dumps(DOCUMENT))
    place = document["components"]["schemas"][name]
    for step in path:
        place = place[step]
    place.update(fields)
    return document


# "The streamed and non-streamed response objects share the same shape", says the document; but until its last
# chunk a choice has no reason, and with include_usage all chunks but one have null for the usage, as the
# description of that option says.
_CHUNKS = changed(
    "CreateCompletionResponse", "properties", "choices", "items", "properties", "finish_reason", nullable=True
)
_CHUNKS["components"]["schemas"]["CreateCompletionResponse"]["properties"]["usage"]["nullable"] = True
COMPLETION, COMPLETION_CHUNK = (
    validator("CreateCompletionResponse"),
    validator("CreateCompletionResponse", document=_CHUNKS),
)
CHAT_ANSWER, CHAT_CHUNK = (
    validator("CreateChatCompletionResponse"),
    validator("CreateChatCompletionStreamResponse"),
)

# The first token of an echoed prompt has no log-probability: null stands there in OpenAI's own answers.
_ECHO = changed("CreateCompletionResponse")
_LISTS = _ECHO["components"]["schemas"]["CreateCompletionResponse"]["properties"]["choices"]["items"][
    "properties"
]["logprobs"]
for _list in ("token_logprobs", "top_logprobs"):
    _LISTS["anyOf"][0]["properties"][_list]["items"]["nullable"] = True
ECHO = validator("CreateCompletionResponse", document=_ECHO)

OPTIONS: list[dict[str, Any]] = [
    {"max_tokens": 4},
    {"max_tokens": 0},
    {"max_tokens": 20, "n": 3, "seed": 1},
    {"max_tokens": 40, "stop": ["e", "a"], "temperature": 0},
    {"max_tokens": 4, "logit_bias": {str(EOS): 100}},
    {"max_tokens": 30, "response_format": {"type": "json_object"}},
]
LEGACY_LOGPROBS: list[dict[str, Any]] = [{"logprobs": 0, "max_tokens": 4}, {"logprobs": 3, "max_tokens": 40}]
CHAT_LOGPROBS: list[dict[str, Any]] = [
    {"logprobs": True, "max_tokens": 4},
    {"logprobs": True, "top_logprobs": 3, "max_tokens": 40},
]


def chunks(server: LiveServer, path: str, body: dict[str, Any]) -> Iterator[Any]:
    response = server.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    for line in lines:
        yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("options", OPTIONS + LEGACY_LOGPROBS, ids=str)
def test_completions(server: LiveServer, options: dict[str, Any]) -> None:
    for prompt in ("Hello", ["Hello", "World"], [BOS, 400], [[BOS, 400], [BOS]]):
        COMPLETION.validate(server.complete(prompt=prompt, **options))


@pytest.mark.parametrize("options", LEGACY_LOGPROBS, ids=str)
def test_echoed_prompts(server: LiveServer, options: dict[str, Any]) -> None:
    ECHO.validate(server.complete(prompt="Hello", echo=True, **options))
    with pytest.raises(jsonschema.ValidationError):  # the exception is needed for this alone
        COMPLETION.validate(server.complete(prompt="Hello", echo=True, **options))


@pytest.mark.parametrize("usage", [{}, USAGE], ids=["", "usage"])
@pytest.mark.parametrize("options", OPTIONS + LEGACY_LOGPROBS, ids=str)
def test_completion_chunks(server: LiveServer, options: dict[str, Any], usage: dict[str, Any]) -> None:
    found = list(chunks(server, COMPLETIONS, {"prompt": ["Hello", "World"], **options, **usage}))
    for chunk in found:
        COMPLETION_CHUNK.validate(chunk)
    # Chunks that end a choice, and the one with the usage, need no exception.
    ends = [chunk for chunk in found if not chunk["choices"] or chunk["choices"][0]["finish_reason"]]
    assert len(ends) == 2 * options.get("n", 1) + len(usage)
    for chunk in ends:
        if chunk.get("usage", {}) is not None:
            COMPLETION.validate(chunk)


@pytest.mark.parametrize("options", OPTIONS + CHAT_LOGPROBS, ids=str)
def test_chats(server: LiveServer, options: dict[str, Any]) -> None:
    CHAT_ANSWER.validate(server.chat(messages=HELLO, **options))


@pytest.mark.parametrize("usage", [{}, USAGE], ids=["", "usage"])
@pytest.mark.parametrize("options", OPTIONS + CHAT_LOGPROBS, ids=str)
def test_chat_chunks(server: LiveServer, options: dict[str, Any], usage: dict[str, Any]) -> None:
    found = list(chunks(server, CHAT, {"messages": HELLO, **options, **usage}))
    assert len(found) >= 2
    for chunk in found:
        CHAT_CHUNK.validate(chunk)


def test_embeddings(server: LiveServer) -> None:
    embeddings = validator("CreateEmbeddingResponse")
    embeddings.validate(
        server.post("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "float"}).json()
    )


def test_models(server: LiveServer) -> None:
    """With more fields than OpenAI has."""
    validator("ListModelsResponse", closed=False).validate(server.client.get("/v1/models").json())
    validator("Model", closed=False).validate(server.client.get("/v1/models/fake-gemma").json())


def test_errors(server: LiveServer) -> None:
    error = validator("ErrorResponse")
    for path, body, status in (
        (COMPLETIONS, {}, 400),
        (COMPLETIONS, {"prompt": "a", "model": "x"}, 404),
        (COMPLETIONS, {"prompt": [BOS, POISON]}, 500),
        (CHAT, {"messages": HELLO, "temperature": 9}, 400),
        ("/nope", {}, 404),
        ("/v1/models", {}, 405),
    ):
        response = server.post(path, body)
        assert response.status_code == status
        error.validate(response.json())


def test_extensions_are_there_only_when_asked_for(server: LiveServer) -> None:
    """What the other tests rest on: a field that OpenAI does not know fails them."""
    asked = server.complete(prompt="a", max_tokens=1, return_token_ids=True, return_timings=True)
    assert {error.validator for error in COMPLETION.iter_errors(asked)} == {"additionalProperties"}
    validator("CreateCompletionResponse", closed=False).validate(asked)
