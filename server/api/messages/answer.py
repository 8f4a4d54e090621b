"""What a run looks like in Anthropic's Messages API: one message, or the events that build it up. Both are
made of the same pieces, so that the joined deltas equal the message. Pure: no I/O."""

import uuid
from collections.abc import Iterator
from typing import Any, Literal

from pydantic_core import from_json
from typing_extensions import TypedDict

from server.api.generation.answer import StreamedAnswer
from server.api.generation.run import ChoiceEvent, Usage
from server.api.generation.wire_values import ResponseHead, check_finite
from server.errors import ApiError
from server.http.error_answers import MessageErrorEvent, messages_error
from server.http.json_response import encode_json
from server.text.tool_calls.call_parser import CallPiece

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageText(TypedDict):
    type: Literal["text"]
    text: str


class MessageToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageResponse(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageText | MessageToolUse]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStartEvent(TypedDict):
    type: Literal["message_start"]
    message: MessageResponse


class ContentBlockStartEvent(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: MessageText | MessageToolUse


class PingEvent(TypedDict):
    type: Literal["ping"]


class MessageTextDelta(TypedDict):
    type: Literal["text_delta"]
    text: str


class InputJsonDelta(TypedDict):
    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDeltaEvent(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: MessageTextDelta | InputJsonDelta


class ContentBlockStopEvent(TypedDict):
    type: Literal["content_block_stop"]
    index: int


class MessageEnd(TypedDict):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDeltaEvent(TypedDict):
    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStopEvent(TypedDict):
    type: Literal["message_stop"]


Event = (
    MessageStartEvent
    | ContentBlockStartEvent
    | PingEvent
    | ContentBlockDeltaEvent
    | ContentBlockStopEvent
    | MessageDeltaEvent
    | MessageStopEvent
    | MessageErrorEvent
)


def stop_reason(event: ChoiceEvent, *, has_calls: bool) -> MessageEnd:
    """Why the text ended, and the stop sequence that ended it."""
    if event.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if event.stop_text is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": event.stop_text}
    return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}


def call_input(arguments: str) -> dict[str, Any]:
    """Arguments as an object. Those that were cut hold what is complete, as Anthropic's clients read them
    from a stream; what a model that was free to write anything wrote may be no JSON, and is none then."""
    try:
        value = from_json(arguments, allow_inf_nan=False, allow_partial=True)
        return check_finite(value) if isinstance(value, dict) else {}
    except ValueError:
        return {}


def wire_usage(usage: Usage) -> MessageUsage:
    """Input tokens are those that were computed: what came from the cache is counted beside them. Nothing is
    written to the cache at the client's order."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _written(event: Event) -> bytes:
    return f"event: {event['type']}\ndata: ".encode() + encode_json(event) + b"\n\n"


class MessageAnswer(StreamedAnswer):
    """A stream begins with the first token, not before it; there is a block only for what was said or
    called."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._has_started = False
        self._blocks: list[MessageText | MessageToolUse] = []
        self._arguments: dict[int, str] = {}  # of calls, by their block, in pieces of JSON
        self._end: MessageEnd = {"stop_reason": "end_turn", "stop_sequence": None}

    def chunks(self, event: ChoiceEvent, usage: Usage) -> bytes:
        written = b""
        if not self._has_started:
            self._has_started = True
            written += _written({"type": "message_start", "message": self._message([], None, None, usage)})
        return written + b"".join(map(_written, self._take(event)))

    def end(self, usage: Usage) -> bytes:
        events: list[Event] = [
            *self._close(),
            {"type": "message_delta", "delta": self._end, "usage": wire_usage(usage)},
            {"type": "message_stop"},
        ]
        return b"".join(map(_written, events))

    def failure(self, error: ApiError, usage: Usage) -> bytes:
        return _written(messages_error(error))

    def collect(self, event: ChoiceEvent) -> None:
        for _ in self._take(event):
            pass

    def body(self, usage: Usage) -> MessageResponse:
        for index, arguments in self._arguments.items():
            block = self._blocks[index]
            assert block["type"] == "tool_use"
            block["input"] = call_input(arguments)
        return self._message(self._blocks, self._end["stop_reason"], self._end["stop_sequence"], usage)

    def _message(
        self,
        content: list[MessageText | MessageToolUse],
        reason: StopReason | None,
        stop_sequence: str | None,
        usage: Usage,
    ) -> MessageResponse:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop_sequence,
            "usage": wire_usage(usage),
        }

    def _take(self, event: ChoiceEvent) -> Iterator[Event]:
        """Events show the blocks themselves: each is to be written before the next is taken."""
        for part in event.parts:
            yield from self._call(part) if isinstance(part, CallPiece) else self._text(part)
        if event.finish_reason is not None:
            self._end = stop_reason(event, has_calls=bool(self._arguments))

    def _text(self, text: str) -> Iterator[Event]:
        if not self._blocks or self._blocks[-1]["type"] != "text":
            yield from self._open({"type": "text", "text": ""})
        block = self._blocks[-1]
        assert block["type"] == "text"
        block["text"] += text
        yield self._delta({"type": "text_delta", "text": text})

    def _call(self, piece: CallPiece) -> Iterator[Event]:
        if piece.name is not None:
            call_id = f"toolu_{uuid.uuid4().hex}"
            yield from self._open({"type": "tool_use", "id": call_id, "name": piece.name, "input": {}})
            self._arguments[len(self._blocks) - 1] = ""
        if piece.arguments:
            self._arguments[len(self._blocks) - 1] += piece.arguments
            yield self._delta({"type": "input_json_delta", "partial_json": piece.arguments})

    def _open(self, block: MessageText | MessageToolUse) -> Iterator[Event]:
        yield from self._close()
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}
        if len(self._blocks) == 1:
            yield {"type": "ping"}

    def _close(self) -> Iterator[Event]:
        """Ends the last block, if there is one."""
        if self._blocks:
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, delta: MessageTextDelta | InputJsonDelta) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}
