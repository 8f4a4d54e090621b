"""What a run looks like in Anthropic's Messages API: one message, or the events that build it up. Both are made of the same
pieces, so that the joined deltas equal the message. Pure: no I/O."""

from collections.abc import Mapping
from typing import Any

from server.api.error_answers import messages_error
from server.api.generation import ChoiceEvent, Usage
from server.api.wire_values import ResponseHead, encode_json
from server.errors import ApiError


def stop_reason(event: ChoiceEvent) -> tuple[str, str | None]:
    """Why the text ended, and the stop sequence that ended it."""
    if event.finish_reason == "length":
        return "max_tokens", None
    return ("end_turn", None) if event.stop_text is None else ("stop_sequence", event.stop_text)


def wire_usage(usage: Usage) -> dict[str, int]:
    """Input tokens are those that were computed: what came from the cache is counted beside them. Nothing is written to the cache
    at the client's order."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def message(
    head: ResponseHead, text: str, reason: str | None, stop_sequence: str | None, used: Mapping[str, int]
) -> dict[str, Any]:
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [{"type": "text", "text": text}] if text else [],
        "stop_reason": reason,
        "stop_sequence": stop_sequence,
        "usage": used,
    }


def _event(name: str, **fields: Any) -> bytes:
    return f"event: {name}\ndata: ".encode() + encode_json({"type": name, **fields}) + b"\n\n"


class MessageAnswer:
    """A stream begins with the first token, not before it; the text block is there only if there is text."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._has_started = False
        self._texts: list[str] = []
        self._end: tuple[str, str | None] = ("end_turn", None)

    def chunks(self, event: ChoiceEvent, usage: Usage) -> bytes:
        written = b""
        if not self._has_started:
            self._has_started = True
            written += _event("message_start", message=message(self._head, "", None, None, wire_usage(usage)))
        if event.text:
            if not self._texts:
                block = {"type": "text", "text": ""}
                written += _event("content_block_start", index=0, content_block=block) + _event("ping")
            written += _event("content_block_delta", index=0, delta={"type": "text_delta", "text": event.text})
        self.collect(event)
        return written

    def end(self, usage: Usage) -> bytes:
        reason, stop_sequence = self._end
        delta = {"stop_reason": reason, "stop_sequence": stop_sequence}
        written = _event("content_block_stop", index=0) if self._texts else b""
        return written + _event("message_delta", delta=delta, usage=wire_usage(usage)) + _event("message_stop")

    def failure(self, error: ApiError, usage: Usage) -> bytes:
        return b"event: error\ndata: " + encode_json(messages_error(error)) + b"\n\n"

    def collect(self, event: ChoiceEvent) -> None:
        if event.text:
            self._texts.append(event.text)
        if event.finish_reason is not None:
            self._end = stop_reason(event)

    def collected(self, usage: Usage) -> dict[str, Any]:
        return message(self._head, "".join(self._texts), *self._end, wire_usage(usage))
