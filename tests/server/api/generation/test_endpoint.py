"""A request from its body to its answer, on an engine that says what it is told to: what is counted, what is
given back, and that a failure before the first token is no stream."""

import asyncio
import json
from typing import Any

import pytest
from starlette.responses import Response

from server.api.chat.answer import ChatAnswer
from server.api.chat.plan import prepare_chat
from server.api.chat.request import ChatCompletionRequest
from server.api.completions.answer import CompletionAnswer
from server.api.completions.plan import prepare_completion
from server.api.completions.request import CompletionRequest
from server.api.generation.endpoint import GenerationEndpoint
from server.engine.request import RequestFailedError
from server.errors import ApiError
from server.state import ServerState
from tests.server.api.fakes import FakeEngine, output, post, server_state
from tests.server.text.small_tokenizer import build_tokenizer

A = build_tokenizer().encode_plain("a")[0]
COMPLETIONS = GenerationEndpoint(
    "completions",
    "cmpl-",
    CompletionRequest,
    prepare_completion,
    lambda intake, plan, body, head: CompletionAnswer(intake.loaded.tokenizer, plan, body, head),
)
CHAT = GenerationEndpoint(
    "chat_completions",
    "chatcmpl-",
    ChatCompletionRequest,
    prepare_chat,
    lambda intake, plan, body, head: ChatAnswer(intake.loaded.tokenizer, plan, body, head),
)


def handled(
    state: ServerState, body: dict[str, Any], endpoint: GenerationEndpoint[Any] = COMPLETIONS
) -> tuple[Response, bytes]:
    """The answer, and all that it sends."""
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def handle() -> Response:
        request = post(state, "/v1/completions", body)
        response = await endpoint.handle(request)
        await response(request.scope, request.receive, send)
        return response

    return asyncio.run(handle()), b"".join(sent)


def counted(state: ServerState, **labels: str) -> float:
    value = state.metrics.registry.get_sample_value("gemserve_requests_total", labels)
    assert value is not None
    return value


def check_nothing_is_left(state: ServerState) -> None:
    assert (state.admission.num_requests, state.admission.num_tokens) == (0, 0)
    assert state.metrics.registry.get_sample_value("gemserve_streams_active") == 0


def test_an_answer_in_one_piece() -> None:
    state = server_state(FakeEngine([output(A), output(A, finish="length")]))
    response, content = handled(state, {"prompt": "b", "store": True})
    body = json.loads(content)
    assert body["choices"][0]["text"] == "aa"
    assert body["id"].startswith("cmpl-")
    assert response.headers["x-gemserve-ignored-parameters"] == "store"
    assert "server-timing" in response.headers
    assert counted(state, endpoint="completions", stream="false", outcome="length") == 1
    check_nothing_is_left(state)


def test_a_stream() -> None:
    state = server_state(FakeEngine([output(A), output(A, finish="length")]))
    response, content = handled(state, {"prompt": "b", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert content.count(b"data: ") == 4
    assert content.endswith(b"data: [DONE]\n\n")
    assert counted(state, endpoint="completions", stream="true", outcome="length") == 1
    check_nothing_is_left(state)


@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_before_the_first_token_is_an_error_and_no_stream(stream: bool) -> None:
    state = server_state(FakeEngine([RequestFailedError("bad")]))
    with pytest.raises(ApiError) as failed:
        handled(state, {"prompt": "b", "stream": stream})
    assert failed.value.status == 500
    check_nothing_is_left(state)


def test_what_fails_later_ends_the_stream_with_the_error() -> None:
    state = server_state(FakeEngine([output(A), RequestFailedError("bad")]))
    _, content = handled(state, {"prompt": "b", "stream": True})
    events = content.split(b"\n\n")
    assert json.loads(events[1].removeprefix(b"data: "))["error"]["code"] == "internal_error"
    assert events[2] == b"data: [DONE]"
    check_nothing_is_left(state)


@pytest.mark.parametrize(
    ("body", "rejection"),
    [({}, "invalid"), ({"prompt": "a", "model": "nobody"}, "model_not_found")],
)
def test_what_is_refused_is_counted_by_its_reason(body: dict[str, Any], rejection: str) -> None:
    engine = FakeEngine([])
    state = server_state(engine)
    with pytest.raises(ApiError):
        handled(state, body)
    labels = {"endpoint": "completions", "reason": rejection}
    assert state.metrics.registry.get_sample_value("gemserve_request_rejections_total", labels) == 1
    assert engine.requests == []
    check_nothing_is_left(state)


def test_without_a_model_everything_is_refused() -> None:
    with pytest.raises(ApiError) as refused:
        handled(server_state(), {"prompt": "a"})
    assert (refused.value.status, refused.value.code) == (503, "model_not_ready")


def test_a_chat_goes_the_same_way() -> None:
    state = server_state(FakeEngine([output(A, finish="length")], max_model_len=512))
    _, content = handled(state, {"messages": [{"role": "user", "content": "a"}]}, CHAT)
    body = json.loads(content)
    assert body["choices"][0]["message"]["content"] == "a"
    assert body["usage"]["completion_tokens"] == 1
