"""What OpenAI's client for Node has beyond the two generation endpoints: its helpers, models, embeddings,
responses, headers."""

from typing import Any

import numpy as np
import pytest

from tests.http.clients import texts
from tests.http.clients.adapters import CHAT, MODEL, OpenAINode, Refused
from tests.http.live_server import LiveServer
from tests.http.tool_requests import TOOLS

USER = [{"role": "user", "content": "Weather?"}]
RESPONSE = {"model": MODEL, "input": "Weather?", "temperature": 1}


def test_models(node: OpenAINode, wire: LiveServer) -> None:
    assert [model["id"] for model in node.call(wire.url, "models.list")["chunks"]] == [MODEL]
    card = node.call(wire.url, "models.retrieve", MODEL)["value"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 1536)
    assert card["default_sampling"] == {"temperature": 1, "top_p": 1, "top_k": 0}
    with pytest.raises(Refused, match="NotFoundError 404 model_not_found"):
        node.call(wire.url, "models.retrieve", "gpt-x")


def test_embeddings_which_it_asks_for_in_base64(node: OpenAINode, wire: LiveServer) -> None:
    inputs = ["Hello", "World"]
    found = node.call(wire.url, "embeddings.create", {"model": MODEL, "input": inputs})["value"]["data"]
    raw = wire.post("/v1/embeddings", {"input": inputs, "encoding_format": "float"}).json()["data"]
    assert [item["embedding"] for item in found] == [
        pytest.approx(item["embedding"], abs=1e-6) for item in raw
    ]
    assert np.linalg.norm(found[0]["embedding"]) == pytest.approx(1, abs=1e-5)


def test_the_request_id_is_the_answers(node: OpenAINode, wire: LiveServer) -> None:
    outcome = node.call(wire.url, "completions.create", {"model": MODEL, "prompt": "a", "max_tokens": 1})
    assert outcome["request_id"] == outcome["value"]["id"]
    headers = {"headers": {"X-Request-Id": "mine"}}
    assert (
        node.call(wire.url, "completions.create", {"model": MODEL, "prompt": "a"}, headers)["request_id"]
        == "mine"
    )


@pytest.mark.parametrize("seed", [texts.PLAIN, texts.TWO_CALLS])
def test_the_streaming_helper_puts_the_answer_together(node: OpenAINode, wire: LiveServer, seed: int) -> None:
    body = {
        "model": MODEL,
        "messages": USER,
        "tools": TOOLS,
        "seed": seed,
        "temperature": 1,
        "max_tokens": 300,
    }
    final = node.call(wire.url, f"{CHAT}.stream", {**body, "stream_options": {"include_usage": True}})[
        "value"
    ]
    whole = node.ask(wire.url, CHAT, body)

    def said(answer: dict[str, Any]) -> tuple[Any, ...]:
        (choice,) = answer["choices"]
        calls = [
            (call["function"]["name"], call["function"]["arguments"])
            for call in choice["message"].get("tool_calls") or ()
        ]
        return (
            choice["message"]["content"],
            choice["finish_reason"],
            calls,
            answer["usage"]["completion_tokens"],
        )

    assert said(final) == said(whole)


def test_responses(node: OpenAINode, wire: LiveServer) -> None:
    whole = node.call(wire.url, "responses.create", {**RESPONSE, "seed": texts.PLAIN})["value"]
    assert whole["output_text"] == texts.TEXTS[texts.PLAIN]
    events = node.call(wire.url, "responses.create", {**RESPONSE, "seed": texts.PLAIN, "stream": True})[
        "chunks"
    ]
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
    assert (
        "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        == whole["output_text"]
    )


def test_the_streaming_helper_of_responses(node: OpenAINode, wire: LiveServer) -> None:
    functions = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
    outcome = node.call(
        wire.url, "responses.stream", {**RESPONSE, "tools": functions, "seed": texts.TWO_CALLS}
    )
    assert [item["type"] for item in outcome["value"]["output"]] == [
        "message",
        "function_call",
        "function_call",
    ]
    assert outcome["value"]["output"][1]["arguments"] == texts.ARGUMENTS
    assert outcome["chunks"][0] == "response.created"


def test_a_failure_of_a_response_is_an_event(node: OpenAINode, wire: LiveServer) -> None:
    events = node.call(wire.url, "responses.create", {**RESPONSE, "seed": texts.FAILING, "stream": True})[
        "chunks"
    ]
    assert events[-1]["type"] == "response.failed"
