"""Anthropic's Python client against a server with a key: what is refused is its own exception, streamed or
not, and the events of a stream say what the same chat says."""

from typing import Any

import anthropic
import pytest

from tests.http.clients import texts
from tests.http.clients.adapters import KEY, MODEL
from tests.http.live_server import LiveServer

BODY: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 20,
    "messages": [{"role": "user", "content": "Weather?"}],
}


def ask(server: LiveServer, streamed: bool, key: str = KEY, **fields: Any) -> list[Any]:
    """The message, or the events of its stream."""
    with anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0) as client:
        if not streamed:
            return [client.messages.create(**{**BODY, **fields})]
        with client.messages.create(**{**BODY, **fields}, stream=True) as events:
            return list(events)


@pytest.mark.parametrize("seed", [texts.PLAIN, texts.SUN, texts.RANDOM])
def test_a_message_is_the_chat_streamed_or_not(wire: LiveServer, seed: int) -> None:
    raw = wire.chat(messages=BODY["messages"], max_tokens=80, temperature=1, seed=seed)
    text, completion_tokens = raw["choices"][0]["message"]["content"], raw["usage"]["completion_tokens"]
    extra: dict[str, Any] = {"max_tokens": 80, "extra_body": {"temperature": 1, "seed": seed}}
    (message,) = ask(wire, False, **extra)
    events = ask(wire, True, **extra)
    assert message.content[0].text == text
    assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == text
    assert [events[0].type, events[-1].type] == ["message_start", "message_stop"]
    (delta,) = [event for event in events if event.type == "message_delta"]
    assert delta.usage.output_tokens == message.usage.output_tokens == completion_tokens
    assert (
        delta.delta.stop_reason
        == message.stop_reason
        == ("max_tokens" if seed == texts.RANDOM else "end_turn")
    )


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_refusals(wire: LiveServer, busy: LiveServer, loading: LiveServer, streamed: bool) -> None:
    def refused(
        server: LiveServer,
        kind: type[anthropic.APIStatusError],
        status: int,
        match: str | None = None,
        **fields: Any,
    ) -> None:
        with pytest.raises(kind, match=match) as raised:
            ask(server, streamed, **fields)
        assert raised.value.status_code == status

    refused(wire, anthropic.BadRequestError, 400, "max_tokens", max_tokens=-1)
    refused(
        wire,
        anthropic.BadRequestError,
        400,
        "maximum context length",
        messages=[{"role": "user", "content": "a" * 1600}],
    )
    refused(wire, anthropic.AuthenticationError, 401, "key", key="wrong")
    refused(wire, anthropic.NotFoundError, 404, "does not exist", model="claude")
    refused(busy, anthropic.RateLimitError, 429)
    refused(loading, anthropic.InternalServerError, 503)
    refused(
        wire, anthropic.InternalServerError, 500, extra_body={"seed": texts.FAILING_AT_ONCE, "temperature": 1}
    )


def test_a_fault_after_the_first_token_ends_the_stream_with_it(wire: LiveServer) -> None:
    with pytest.raises(anthropic.APIStatusError, match="not finite"):
        ask(wire, True, extra_body={"seed": texts.FAILING, "temperature": 1})
