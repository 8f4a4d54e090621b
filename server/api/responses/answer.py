"""Answers of /v1/responses: the events of a run become items (a message, calls of functions) and OpenAI's
typed stream events. An answer in one piece is the response of the last event, so that both ways say the same
by construction. Pure: no I/O."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from server.api.generation.plan import GenerationPlan
from server.api.generation.run import ChoiceEvent, Usage
from server.api.generation.sampling import effective_temperature, effective_top_p
from server.api.generation.token_text import chat_entry
from server.api.generation.tool_schemas import ToolChoice
from server.api.generation.wire_values import ResponseHead
from server.api.responses.request import ResponseRequest
from server.errors import ApiError
from server.http.json_response import encode_json
from server.state import ServerState
from server.text.tokenizer import Tokenizer
from server.text.tool_calls.call_parser import CallPiece

Event = dict[str, Any]


class ResponseAnswer:
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
        self._status = "in_progress"
        self._incomplete_details: dict[str, str] | None = None
        self._error: dict[str, str] | None = None
        self._usage: dict[str, Any] | None = None
        self._completed_at: int | None = None
        self._items: list[dict[str, Any]] = []
        self._num_events = 0
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text has not been sent

    def chunks(self, event: ChoiceEvent, usage: Usage) -> bytes:
        return b"".join(map(_written, self._take(event)))

    def end(self, usage: Usage) -> bytes:
        self._finish(usage)
        return _written(self._event(f"response.{self._status}", response=self._response()))

    def failure(self, error: ApiError, usage: Usage) -> bytes:
        """What was said stays; the open item is cut there."""
        begin = [] if self._num_events else list(self._begin())
        for item in self._items[-1:]:
            if item["status"] == "in_progress":
                item["status"] = "incomplete"
        self._status = "failed"
        self._error = {"code": "server_error", "message": error.body()["error"]["message"]}
        self._usage = wire_usage(usage)
        return b"".join(map(_written, [*begin, self._event("response.failed", response=self._response())]))

    def collect(self, event: ChoiceEvent) -> None:
        for _ in self._take(event):
            pass

    def collected(self, usage: Usage) -> dict[str, Any]:
        self._finish(usage)
        return self._response()

    def _take(self, event: ChoiceEvent) -> Iterator[Event]:
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
        yield self._event("response.created", response=self._response())
        yield self._event("response.in_progress", response=self._response())

    def _entry(self, event: ChoiceEvent, position: int) -> dict[str, Any]:
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
        part = self._items[-1]["content"][0]
        part["text"] += text
        logprobs, self._logprobs = self._logprobs, []
        part["logprobs"] += logprobs
        yield self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def _open_message(self) -> Iterator[Event]:
        item: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
        }
        yield self._open({**item, "content": []})
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items[-1]["content"] = [part]
        yield self._part_event("response.content_part.added", part=_copy(part))

    def _part_event(self, kind: str, **fields: Any) -> Event:
        return self._item_event(kind, content_index=0, **fields)

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
            self._items[-1]["arguments"] += piece.arguments
            yield self._item_event("response.function_call_arguments.delta", delta=piece.arguments)

    # -- any item

    def _open(self, item: dict[str, Any]) -> Event:
        self._items.append(item)
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=_copy(item))

    def _close(self, status: str) -> Iterator[Event]:
        """Ends the open item, if there is one."""
        item = self._items[-1] if self._items else None
        if item is None or item["status"] != "in_progress":
            return
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            part["logprobs"] += self._logprobs
            self._logprobs = []
            yield self._part_event(
                "response.output_text.done", text=part["text"], logprobs=list(part["logprobs"])
            )
            yield self._part_event("response.content_part.done", part=_copy(part))
        else:
            name, arguments = item["name"], item["arguments"]
            yield self._item_event("response.function_call_arguments.done", name=name, arguments=arguments)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=_copy(item))

    def _item_event(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event

    # -- the response

    def _finish(self, usage: Usage) -> None:
        if self._status == "in_progress":
            self._status, self._completed_at = "completed", int(time.time())
        self._usage = wire_usage(usage)

    def _response(self) -> dict[str, Any]:
        return {
            **self._fields,
            "status": self._status,
            "completed_at": self._completed_at,
            "error": self._error,
            "incomplete_details": self._incomplete_details,
            "output": [_copy(item) for item in self._items],
            "usage": self._usage,
        }


def _written(event: Event) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), encode_json(event))


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """As it is now: events are written after the item has gone on."""
    return {
        name: [dict(part) for part in value] if name == "content" else value for name, value in item.items()
    }


def wire_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _request_fields(state: ServerState, body: ResponseRequest, head: ResponseHead) -> dict[str, Any]:
    """What every response of a request repeats of it, with the defaults filled in."""
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
