"""Answers of /v1/responses: the events of a run become items (a message, calls of functions) and OpenAI's
typed stream events. An answer in one piece is the response of the last event, so that both ways say the same
by construction. Pure: no I/O."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from typing_extensions import TypedDict

from server.api.generation.answer import StreamedAnswer
from server.api.generation.plan import GenerationPlan
from server.api.generation.run import ChoiceEvent, Usage
from server.api.generation.sampling import effective_temperature, effective_top_p
from server.api.generation.token_text import ChatTokenLogprob, chat_entry
from server.api.generation.tool_schemas import ToolChoice
from server.api.generation.wire_values import ResponseHead
from server.api.responses.request import ResponseRequest
from server.errors import ApiError
from server.http.json_response import encode_json
from server.state import ServerState
from server.text.tokenizer import Tokenizer
from server.text.tool_calls.call_parser import CallPiece

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseInputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class ResponseOutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsageSchema(TypedDict):
    input_tokens: int
    input_tokens_details: ResponseInputTokensDetails
    output_tokens: int
    output_tokens_details: ResponseOutputTokensDetails
    total_tokens: int


class ResponseOutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class ResponseOutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[ResponseOutputText]


class ResponseFunctionCall(TypedDict):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = ResponseOutputMessage | ResponseFunctionCall


class ResponseErrorSchema(TypedDict):
    code: str
    message: str


class _RequestFields(TypedDict):
    """What every response of a request repeats of it, with the defaults filled in."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, None]
    service_tier: str
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class ResponseObject(_RequestFields):
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    completed_at: int | None
    error: ResponseErrorSchema | None
    incomplete_details: dict[str, str] | None
    output: list[OutputItem]
    usage: ResponseUsageSchema | None


class ResponseEvent(TypedDict):
    """Of the whole response: it begins, or ends."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseObject


class ResponseItemEvent(TypedDict):
    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


class ResponsePartEvent(TypedDict):
    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: ResponseOutputText


class ResponseTextDelta(TypedDict):
    type: Literal["response.output_text.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[ChatTokenLogprob]


class ResponseTextDone(TypedDict):
    type: Literal["response.output_text.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[ChatTokenLogprob]


class ResponseArgumentsDelta(TypedDict):
    type: Literal["response.function_call_arguments.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ResponseArgumentsDone(TypedDict):
    type: Literal["response.function_call_arguments.done"]
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


Event = (
    ResponseEvent
    | ResponseItemEvent
    | ResponsePartEvent
    | ResponseTextDelta
    | ResponseTextDone
    | ResponseArgumentsDelta
    | ResponseArgumentsDone
)


class ResponseAnswer(StreamedAnswer):
    def __init__(
        self,
        state: ServerState,
        tokenizer: Tokenizer,
        plan: GenerationPlan,
        body: ResponseRequest,
        head: ResponseHead,
    ) -> None:
        self._tokenizer = tokenizer
        self._shows_logprobs = body.shows_logprobs
        self._top_logprobs = body.top_logprobs or 0
        self._only_calls = plan.calls is not None and plan.calls.is_forced
        self._fields = _request_fields(state, body, head)
        self._status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
        self._incomplete_details: dict[str, str] | None = None
        self._error: ResponseErrorSchema | None = None
        self._usage: ResponseUsageSchema | None = None
        self._completed_at: int | None = None
        self._items: list[OutputItem] = []
        self._num_events = 0
        self._logprobs: list[ChatTokenLogprob] = []  # of tokens whose text has not been sent

    def chunks(self, event: ChoiceEvent, usage: Usage) -> bytes:
        return b"".join(map(_written, self._take(event)))

    def end(self, usage: Usage) -> bytes:
        response = self.body(usage)
        kind: Literal["response.incomplete", "response.completed"] = (
            "response.incomplete" if self._status == "incomplete" else "response.completed"
        )
        return _written({"type": kind, "sequence_number": self._next(), "response": response})

    def failure(self, error: ApiError, usage: Usage) -> bytes:
        """What was said stays; the open item is cut there."""
        events: list[Event] = [] if self._num_events else list(self._begin())
        for item in self._items[-1:]:
            if item["status"] == "in_progress":
                item["status"] = "incomplete"
        self._status = "failed"
        self._error = {"code": "server_error", "message": error.body()["error"]["message"]}
        self._usage = wire_usage(usage)
        events.append(
            {"type": "response.failed", "sequence_number": self._next(), "response": self._response()}
        )
        return b"".join(map(_written, events))

    def collect(self, event: ChoiceEvent) -> None:
        for _ in self._take(event):
            pass

    def body(self, usage: Usage) -> ResponseObject:
        if self._status == "in_progress":
            self._status, self._completed_at = "completed", int(time.time())
        self._usage = wire_usage(usage)
        return self._response()

    def _take(self, event: ChoiceEvent) -> Iterator[Event]:
        """Events show the items themselves: each is to be written before the next is taken."""
        if not self._num_events:
            yield from self._begin()
        if self._shows_logprobs:
            self._logprobs += [self._entry(event, position) for position in range(len(event.logprobs))]
        for part in event.parts:
            yield from self._call(part) if isinstance(part, CallPiece) else self._text(part)
        if event.finish_reason is None:
            return
        if event.finish_reason == "length":
            self._status, self._incomplete_details = "incomplete", {"reason": "max_output_tokens"}
        if not self._items and not self._only_calls:
            yield from self._open_message()
        yield from self._close("incomplete" if event.finish_reason == "length" else "completed")

    def _begin(self) -> Iterator[Event]:
        yield {"type": "response.created", "sequence_number": self._next(), "response": self._response()}
        yield {"type": "response.in_progress", "sequence_number": self._next(), "response": self._response()}

    def _entry(self, event: ChoiceEvent, position: int) -> ChatTokenLogprob:
        entry = chat_entry(
            self._tokenizer, self._tokenizer.token_text, event.logprobs[position], self._top_logprobs
        )
        for shown in (entry, *entry["top_logprobs"]):
            shown["bytes"] = shown["bytes"] or []  # never null here
        return entry

    # -- a message

    def _text(self, text: str) -> Iterator[Event]:
        if not self._items or self._items[-1]["type"] != "message":
            yield from self._close("completed")
            yield from self._open_message()
        item = self._items[-1]
        assert item["type"] == "message"
        part = item["content"][0]
        part["text"] += text
        logprobs, self._logprobs = self._logprobs, []
        part["logprobs"] += logprobs
        yield {
            "type": "response.output_text.delta",
            "sequence_number": self._next(),
            "item_id": item["id"],
            "output_index": self._last,
            "content_index": 0,
            "delta": text,
            "logprobs": logprobs,
        }

    def _open_message(self) -> Iterator[Event]:
        item: ResponseOutputMessage = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        yield self._open(item)
        item["content"].append({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        yield self._part("response.content_part.added", item)

    def _part(
        self,
        kind: Literal["response.content_part.added", "response.content_part.done"],
        item: ResponseOutputMessage,
    ) -> ResponsePartEvent:
        return {
            "type": kind,
            "sequence_number": self._next(),
            "item_id": item["id"],
            "output_index": self._last,
            "content_index": 0,
            "part": item["content"][0],
        }

    # -- calls

    def _call(self, piece: CallPiece) -> Iterator[Event]:
        self._logprobs = []  # calls have no place for them
        if piece.name is not None:
            yield from self._close("completed")
            yield self._open(
                {
                    "id": f"fc_{uuid.uuid4().hex}",
                    "type": "function_call",
                    "status": "in_progress",
                    "call_id": f"call_{uuid.uuid4().hex}",
                    "name": piece.name,
                    "arguments": "",
                }
            )
        if piece.arguments:
            item = self._items[-1]
            assert item["type"] == "function_call"
            item["arguments"] += piece.arguments
            yield {
                "type": "response.function_call_arguments.delta",
                "sequence_number": self._next(),
                "item_id": item["id"],
                "output_index": self._last,
                "delta": piece.arguments,
            }

    # -- any item

    @property
    def _last(self) -> int:
        """The index of the last item."""
        return len(self._items) - 1

    def _open(self, item: OutputItem) -> Event:
        self._items.append(item)
        return {
            "type": "response.output_item.added",
            "sequence_number": self._next(),
            "output_index": self._last,
            "item": item,
        }

    def _close(self, status: ItemStatus) -> Iterator[Event]:
        """Ends the open item, if there is one."""
        item = self._items[-1] if self._items else None
        if item is None or item["status"] != "in_progress":
            return
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            part["logprobs"] += self._logprobs
            self._logprobs = []
            yield {
                "type": "response.output_text.done",
                "sequence_number": self._next(),
                "item_id": item["id"],
                "output_index": self._last,
                "content_index": 0,
                "text": part["text"],
                "logprobs": part["logprobs"],
            }
            yield self._part("response.content_part.done", item)
        else:
            yield {
                "type": "response.function_call_arguments.done",
                "sequence_number": self._next(),
                "item_id": item["id"],
                "output_index": self._last,
                "name": item["name"],
                "arguments": item["arguments"],
            }
        yield {
            "type": "response.output_item.done",
            "sequence_number": self._next(),
            "output_index": self._last,
            "item": item,
        }

    def _next(self) -> int:
        """The number of the next event."""
        self._num_events += 1
        return self._num_events - 1

    # -- the response

    def _response(self) -> ResponseObject:
        return {
            **self._fields,
            "status": self._status,
            "completed_at": self._completed_at,
            "error": self._error,
            "incomplete_details": self._incomplete_details,
            "output": self._items,
            "usage": self._usage,
        }


def _written(event: Event) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), encode_json(event))


def wire_usage(usage: Usage) -> ResponseUsageSchema:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _request_fields(state: ServerState, body: ResponseRequest, head: ResponseHead) -> _RequestFields:
    text_format = None if body.text is None else body.text.format
    shown_format: dict[str, Any] = {"type": "text"}
    if text_format is not None:
        shown_format = text_format.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "model": head.model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": effective_temperature(state, body),
        "text": {"format": shown_format, "verbosity": "medium"},
        "tool_choice": _shown_choice(body.tool_choice),
        "tools": [_shown_tool(tool.model_dump(exclude_none=True)) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": effective_top_p(state, body),
        "truncation": "disabled",
        "user": body.user,
    }


def _shown_choice(choice: ToolChoice | None) -> Any:
    if choice is None:
        return "auto"
    if choice.is_named and choice.names:
        return {"type": "function", "name": choice.names[0]}
    if choice.names is not None:
        tools: Sequence[dict[str, str]] = [{"type": "function", "name": name} for name in choice.names]
        return {"type": "allowed_tools", "mode": choice.mode, "tools": tools}
    return choice.mode


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"description": None, "parameters": None, "strict": False, **tool}
