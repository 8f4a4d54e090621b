"""What a run looks like in Anthropic's Messages API: one message, or the events that build it up. Both are made of the same
pieces, so that the joined deltas equal the message."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from server.api.error_answers import messages_error
from server.api.generation import ChoiceEvent, GenerationRun, Usage
from server.api.responses import EventStream, JsonResponse, ResponseHead, encode_json
from server.errors import ApiError
from server.metrics import Metrics


def stop_reason(event: ChoiceEvent) -> tuple[str, str | None]:
    """Why the text ended, and the stop sequence that ended it."""
    if event.finish_reason == "length":
        return "max_tokens", None
    return ("end_turn", None) if event.stop_text is None else ("stop_sequence", event.stop_text)


def usage(used: Usage) -> dict[str, int]:
    """Input tokens are those that were computed: what came from the cache is counted beside them. Nothing is written to the cache
    at the client's order."""
    return {
        "input_tokens": used.prompt_tokens - used.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": used.cached_tokens,
        "output_tokens": used.completion_tokens,
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


async def collected_message(run: GenerationRun, head: ResponseHead, headers: Mapping[str, str]) -> Response:
    texts: list[str] = []
    reason, stop_sequence = ("end_turn", None)
    while (event := await run.next_event()) is not None:
        texts.append(event.text)
        if event.finish_reason is not None:
            reason, stop_sequence = stop_reason(event)
    return JsonResponse(message(head, "".join(texts), reason, stop_sequence, usage(run.usage)), headers=dict(headers))


def _event(name: str, **fields: Any) -> bytes:
    return f"event: {name}\ndata: ".encode() + encode_json({"type": name, **fields}) + b"\n\n"


PING = _event("ping")


class MessageStream(EventStream):
    """Begins with the first token, not before it; the text block is there only if there is text."""

    def __init__(
        self, run: GenerationRun, head: ResponseHead, first: ChoiceEvent | None, metrics: Metrics, headers: Mapping[str, str]
    ) -> None:
        super().__init__(run, first, metrics, headers)
        self._head = head
        self._has_started = False
        self._has_block = False
        self._end: tuple[str, str | None] = ("end_turn", None)

    def idle_bytes(self) -> bytes:
        """A ping before the start of the message would confuse clients; a comment does not."""
        return PING if self._has_started else super().idle_bytes()

    def event_bytes(self, event: ChoiceEvent) -> bytes:
        written = b""
        if not self._has_started:
            self._has_started = True
            used = usage(self.run.usage)
            written += _event("message_start", message=message(self._head, "", None, None, used))
        if event.text:
            if not self._has_block:
                self._has_block = True
                written += _event("content_block_start", index=0, content_block={"type": "text", "text": ""}) + PING
            written += _event("content_block_delta", index=0, delta={"type": "text_delta", "text": event.text})
        if event.finish_reason is not None:
            self._end = stop_reason(event)
        return written

    def end_bytes(self) -> bytes:
        written = _event("content_block_stop", index=0) if self._has_block else b""
        reason, stop_sequence = self._end
        delta = {"stop_reason": reason, "stop_sequence": stop_sequence}
        return written + _event("message_delta", delta=delta, usage=usage(self.run.usage)) + _event("message_stop")

    def error_bytes(self, error: ApiError) -> bytes:
        body = messages_error(error)
        return b"event: error\ndata: " + encode_json(body) + b"\n\n"
