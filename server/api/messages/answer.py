"""What a run looks like in Anthropic's Messages API: one message, or the events that build it up. Both are
made of the same pieces, so that the joined deltas equal the message. Pure: no I/O."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from server.api.generation.run import ChoiceEvent, Usage
from server.api.generation.wire_values import ResponseHead, check_finite
from server.errors import ApiError
from server.http.error_answers import messages_error
from server.http.json_response import encode_json
from server.text.tool_calls.call_parser import CallPiece

Block = dict[str, Any]


def stop_reason(event: ChoiceEvent, *, has_calls: bool) -> tuple[str, str | None]:
    """Why the text ended, and the stop sequence that ended it."""
    if event.finish_reason == "length":
        return "max_tokens", None
    if event.stop_text is not None:
        return "stop_sequence", event.stop_text
    return ("tool_use" if has_calls else "end_turn"), None


def call_input(arguments: str) -> dict[str, Any]:
    """Arguments as an object. Those that were cut hold what is complete, as Anthropic's clients read them
    from a stream; what a model that was free to write anything wrote may be no JSON, and is none then."""
    try:
        value = from_json(arguments, allow_inf_nan=False, allow_partial=True)
        return check_finite(value) if isinstance(value, dict) else {}
    except ValueError:
        return {}


def wire_usage(usage: Usage) -> dict[str, int]:
    """Input tokens are those that were computed: what came from the cache is counted beside them. Nothing is
    written to the cache at the client's order."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def message(
    head: ResponseHead,
    content: Sequence[Block],
    reason: str | None,
    stop_sequence: str | None,
    used: Mapping[str, int],
) -> dict[str, Any]:
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stop_sequence,
        "usage": used,
    }


def _event(name: str, **fields: Any) -> bytes:
    return f"event: {name}\ndata: ".encode() + encode_json({"type": name, **fields}) + b"\n\n"


class MessageAnswer:
    """A stream begins with the first token, not before it; there is a block only for what was said or called.
    The input of a call is the text of its arguments until its block is complete."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._has_started = False
        self._blocks: list[Block] = []
        self._end: tuple[str, str | None] = ("end_turn", None)

    def chunks(self, event: ChoiceEvent, usage: Usage) -> bytes:
        written = b""
        if not self._has_started:
            self._has_started = True
            written += _event("message_start", message=message(self._head, [], None, None, wire_usage(usage)))
        return written + b"".join(self._take(event))

    def end(self, usage: Usage) -> bytes:
        reason, stop_sequence = self._end
        delta = {"stop_reason": reason, "stop_sequence": stop_sequence}
        return (
            self._close()
            + _event("message_delta", delta=delta, usage=wire_usage(usage))
            + _event("message_stop")
        )

    def failure(self, error: ApiError, usage: Usage) -> bytes:
        return b"event: error\ndata: " + encode_json(messages_error(error)) + b"\n\n"

    def collect(self, event: ChoiceEvent) -> None:
        for _ in self._take(event):
            pass

    def collected(self, usage: Usage) -> dict[str, Any]:
        content = [
            {**block, "input": call_input(block["input"])} if "input" in block else block
            for block in self._blocks
        ]
        return message(self._head, content, *self._end, wire_usage(usage))

    def _take(self, event: ChoiceEvent) -> Iterator[bytes]:
        for part in event.parts:
            yield from self._call(part) if isinstance(part, CallPiece) else self._text(part)
        if event.finish_reason is not None:
            self._end = stop_reason(event, has_calls=any("input" in block for block in self._blocks))

    def _text(self, text: str) -> Iterator[bytes]:
        if not self._blocks or self._blocks[-1]["type"] != "text":
            yield from self._open({"type": "text", "text": ""})
        self._blocks[-1]["text"] += text
        yield self._delta(type="text_delta", text=text)

    def _call(self, piece: CallPiece) -> Iterator[bytes]:
        if piece.name is not None:
            block = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": piece.name, "input": {}}
            yield from self._open(block)
            self._blocks[-1]["input"] = ""
        if piece.arguments:
            self._blocks[-1]["input"] += piece.arguments
            yield self._delta(type="input_json_delta", partial_json=piece.arguments)

    def _open(self, block: Block) -> Iterator[bytes]:
        yield self._close()
        self._blocks.append(dict(block))
        yield _event("content_block_start", index=len(self._blocks) - 1, content_block=block)
        if len(self._blocks) == 1:
            yield _event("ping")

    def _close(self) -> bytes:
        """Ends the last block, if there is one."""
        return _event("content_block_stop", index=len(self._blocks) - 1) if self._blocks else b""

    def _delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)
