"""What the server refuses is raised by each client as the exception that its users catch, streamed or not,
with the field and the code that OpenAI's clients pass on; a fault is not asked for again, and one after the
first token ends the stream with it."""

from dataclasses import dataclass
from typing import Any

import openai
import pytest

from tests.fakes import BOS, POISON
from tests.http.clients import texts
from tests.http.clients.adapters import CHAT, COMPLETIONS, KEY, MODEL, Adapter, LiteLLM, OpenAINode, Refused
from tests.http.clients.rules import CONTEXT, HELLO, rule
from tests.http.live_server import LiveServer

AUDIO = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}]


@dataclass(frozen=True)
class Refusal:
    ids: str  # of tests/http/README.md
    kind: str
    body: dict[str, Any]
    name: str  # the class of OpenAI's clients, and of litellm's unless that has one of its own
    status: int
    code: str | None
    param: str | None
    litellm: str | None = None


NOT_SENT = "not sent by litellm"


def refusal(
    ids: str,
    kind: str,
    name: str,
    status: int,
    code: str | None,
    param: str | None = None,
    litellm: str | None = None,
    **body: Any,
) -> Refusal:
    return Refusal(ids, kind, rule(kind=kind, **body).body, name, status, code, param, litellm)


BAD = ("BadRequestError", 400)
REFUSALS = [
    refusal("C4 E1 E3 S14", COMPLETIONS, *BAD, "decimal_above_max_value", "temperature", temperature=3),
    refusal("C4 E3 E12", COMPLETIONS, *BAD, "integer_above_max_value", "n", n=1000),
    refusal("C5 E3", COMPLETIONS, *BAD, "empty_array", "prompt", NOT_SENT, prompt=[]),
    refusal("C5 E3", COMPLETIONS, *BAD, "empty_array", "prompt", prompt=[[]]),
    refusal("C5 E3", COMPLETIONS, *BAD, "invalid_value", "prompt", prompt=[2, 99_999]),
    refusal("E3", COMPLETIONS, *BAD, "unsupported_parameter", "suffix", suffix="b"),
    refusal("M16", COMPLETIONS, *BAD, "invalid_value", "priority", priority=1),
    refusal("M15", COMPLETIONS, *BAD, "unknown_parameter", "frobnicate", frobnicate=1),
    refusal("E4 M2", COMPLETIONS, *BAD, "context_length_exceeded", "prompt", "ContextWindowExceededError",
            prompt=[9] * (CONTEXT + 1)),
    refusal("E5 C3", COMPLETIONS, "NotFoundError", 404, "model_not_found", "model", model="gpt-x"),
    refusal("E11", COMPLETIONS, "InternalServerError", 500, "internal_error", prompt=[BOS, POISON]),
    refusal("H3 E3", CHAT, *BAD, "invalid_value", "top_logprobs", top_logprobs=2),
    refusal("H9 E3", CHAT, *BAD, "empty_array", "messages", messages=[]),
    refusal("H9", CHAT, *BAD, "unsupported_value", "messages[0].content", messages=AUDIO),
    refusal("M12", CHAT, *BAD, "invalid_value", "tool_choice", NOT_SENT, tool_choice="required"),
    refusal("E4 M2", CHAT, *BAD, "context_length_exceeded", "messages", "ContextWindowExceededError",
            messages=[{"role": "user", "content": "a" * CONTEXT}]),
    refusal("E5 C3", CHAT, "NotFoundError", 404, "model_not_found", "model", model="gpt-x"),
    refusal("E10 N2", CHAT, "APIStatusError", 408, "request_timeout", litellm="Timeout",
            timeout=0.001, max_tokens=1400, logit_bias={"400": 100}),
    refusal("E11", CHAT, "InternalServerError", 500, "internal_error",
            seed=texts.FAILING_AT_ONCE, temperature=1),
]  # fmt: skip


def refused(
    client: Adapter, url: str, kind: str, body: dict[str, Any], streamed: bool, key: str = KEY
) -> Refused:
    ask = client.stream if streamed else client.ask
    with pytest.raises(Refused) as raised:
        ask(url, kind, body, key=key)
    return raised.value


def check(error: Refused, client: Adapter, expected: Refusal) -> None:
    if isinstance(client, LiteLLM):  # keeps neither code nor param of every error
        assert (error.name, error.status) == (expected.litellm or expected.name, expected.status)
    else:
        assert (error.status, error.code, error.param) == (expected.status, expected.code, expected.param)
        assert error.name == expected.name or (error.name, expected.name) == (
            "APIError",
            "APIStatusError",
        )  # Node has no such


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "expected",
    REFUSALS,
    ids=[f"{number}-{item.ids.replace(' ', '-')}-{item.kind}" for number, item in enumerate(REFUSALS)],
)
def test_a_refusal_is_the_clients_exception(
    client: Adapter, wire: LiveServer, expected: Refusal, streamed: bool
) -> None:
    if isinstance(client, LiteLLM) and expected.litellm == NOT_SENT:
        pytest.skip("litellm does not send what is wrong with it")
    check(refused(client, wire.url, expected.kind, expected.body, streamed), client, expected)


@pytest.mark.parametrize("kind", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_wrong_key(client: Adapter, wire: LiveServer, kind: str, streamed: bool) -> None:
    expected = refusal("E6", kind, "AuthenticationError", 401, "invalid_api_key")
    check(refused(client, wire.url, kind, expected.body, streamed, key="wrong"), client, expected)


@pytest.mark.parametrize("kind", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_full_queue(client: Adapter, busy: LiveServer, kind: str, streamed: bool) -> None:
    expected = refusal("E8", kind, "RateLimitError", 429, "server_overloaded")
    check(refused(client, busy.url, kind, expected.body, streamed), client, expected)


@pytest.mark.parametrize("kind", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_server_without_its_model(client: Adapter, loading: LiveServer, kind: str, streamed: bool) -> None:
    expected = refusal(
        "E9", kind, "InternalServerError", 503, "model_not_ready", litellm="ServiceUnavailableError"
    )
    check(refused(client, loading.url, kind, expected.body, streamed), client, expected)


def test_a_body_that_is_too_large(client: Adapter, wire: LiveServer) -> None:
    error = refused(client, wire.url, COMPLETIONS, {"prompt": "a" * (16 << 20)}, streamed=False)
    assert error.status == 413
    assert error.code == "request_too_large" or isinstance(client, LiteLLM)


@pytest.mark.parametrize("kind", [COMPLETIONS, CHAT])
def test_a_fault_after_the_first_token_ends_the_stream_with_it(
    client: Adapter, wire: LiveServer, kind: str
) -> None:
    body = rule(kind=kind, temperature=1, seed=texts.FAILING, max_tokens=50).body
    error = refused(client, wire.url, kind, body, streamed=True)
    said = [choice for chunk in error.chunks for choice in chunk["choices"]]
    text = "".join(
        choice["text"] if kind == COMPLETIONS else choice["delta"].get("content") or "" for choice in said
    )
    assert text == "So far"
    assert "not finite" in error.message
    if client.keeps_chunks:
        assert error.code == "internal_error"


@pytest.mark.parametrize("language", ["python", "node"])
def test_a_fault_is_not_asked_for_again(
    wire: LiveServer, language: str, request: pytest.FixtureRequest
) -> None:
    """Both clients ask again after a 500 by default."""
    body: dict[str, Any] = {"model": MODEL, "prompt": [BOS, POISON]}
    before = wire.outcomes("error")
    if language == "python":
        with (
            openai.OpenAI(base_url=f"{wire.url}/v1", api_key=KEY) as client,
            pytest.raises(openai.InternalServerError),
        ):
            client.completions.create(**body)
    else:
        node: OpenAINode = request.getfixturevalue("node")
        with pytest.raises(Refused, match="InternalServerError"):
            node.call(wire.url, "completions.create", body, {"maxRetries": 2})
    assert wire.outcomes("error") == before + 1


@pytest.mark.parametrize("kind", [COMPLETIONS, CHAT])
def test_a_client_that_leaves_its_stream_stops_the_work(client: Adapter, wire: LiveServer, kind: str) -> None:
    if isinstance(client, LiteLLM):
        pytest.skip("litellm has no way to leave a stream")
    before = wire.metric("generation_tokens_total")
    body = rule(kind=kind, messages=HELLO, prompt="Hello", temperature=0, max_tokens=1400).body
    del body["prompt" if kind == CHAT else "messages"]
    assert len(client.stream(wire.url, kind, body, take=3)) == 3
    wire.wait_for(wire.is_idle, seconds=60)
    assert wire.metric("generation_tokens_total") < before + 1400
