"""Shapes of the events of streams, for the OpenAPI description; ``answers`` has those of answers in one
piece."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from server.api.schemas.answers import (
    ChatLogprobs,
    ChatTokenLogprob,
    LegacyLogprobsSchema,
    ResponseFunctionCall,
    ResponseObject,
    ResponseOutputMessage,
    ResponseOutputText,
    Timings,
    UsageSchema,
)
from server.api.schemas.messages_answers import (
    MessageResponse,
    MessagesErrorDetail,
    MessageText,
    MessageToolUse,
    MessageUsage,
)

_USAGE = Field(None, description="With stream_options.include_usage; null except in the last chunk.")
_TIMINGS = Field(None, description="With return_timings, in the last chunk of the choices.")
_TOKEN_IDS: list[int] = Field(default_factory=list, description="With return_token_ids.")


class CompletionChunkChoice(BaseModel):
    index: int
    text: str
    logprobs: LegacyLogprobsSchema | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] = _TOKEN_IDS
    prompt_token_ids: list[int] = _TOKEN_IDS


class CompletionChunk(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: UsageSchema | None = _USAGE
    timings: Timings | None = _TIMINGS


class FunctionDelta(BaseModel):
    name: str = Field("", description="With the first piece of a call.")
    arguments: str


class ToolCallDelta(BaseModel):
    index: int
    id: str = Field("", description="With the first piece of a call.")
    type: Literal["function"] = Field("function", description="With the first piece of a call.")
    function: FunctionDelta


class ChatDelta(BaseModel):
    role: Literal["assistant"] = Field("assistant", description="In the first chunk of a choice.")
    content: str | None = None
    tool_calls: list[ToolCallDelta] = Field(default_factory=list)


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: list[int] = _TOKEN_IDS


class ChatCompletionChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: UsageSchema | None = _USAGE
    timings: Timings | None = _TIMINGS
    prompt_token_ids: list[int] = _TOKEN_IDS


class ResponseEvent(BaseModel):
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


class ResponseItemEvent(BaseModel):
    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: ResponseOutputMessage | ResponseFunctionCall


class ResponsePartEvent(BaseModel):
    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: ResponseOutputText


class ResponseTextDelta(BaseModel):
    type: Literal["response.output_text.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[ChatTokenLogprob]


class ResponseTextDone(BaseModel):
    type: Literal["response.output_text.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[ChatTokenLogprob]


class ResponseArgumentsDelta(BaseModel):
    type: Literal["response.function_call_arguments.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ResponseArgumentsDone(BaseModel):
    type: Literal["response.function_call_arguments.done"]
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


class MessageStartEvent(BaseModel):
    type: Literal["message_start"]
    message: MessageResponse


class ContentBlockStartEvent(BaseModel):
    type: Literal["content_block_start"]
    index: int
    content_block: MessageText | MessageToolUse


class PingEvent(BaseModel):
    type: Literal["ping"]


class MessageTextDelta(BaseModel):
    type: Literal["text_delta"]
    text: str


class InputJsonDelta(BaseModel):
    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDeltaEvent(BaseModel):
    type: Literal["content_block_delta"]
    index: int
    delta: MessageTextDelta | InputJsonDelta


class ContentBlockStopEvent(BaseModel):
    type: Literal["content_block_stop"]
    index: int


class MessageEnd(BaseModel):
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None


class MessageDeltaEvent(BaseModel):
    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStopEvent(BaseModel):
    type: Literal["message_stop"]


class MessageErrorEvent(BaseModel):
    """A fault after the first token."""

    type: Literal["error"]
    error: MessagesErrorDetail


RESPONSE_EVENTS: tuple[Any, ...] = (
    ResponseEvent,
    ResponseItemEvent,
    ResponsePartEvent,
    ResponseTextDelta,
    ResponseTextDone,
    ResponseArgumentsDelta,
    ResponseArgumentsDone,
)
MESSAGE_EVENTS: tuple[Any, ...] = (
    MessageStartEvent,
    ContentBlockStartEvent,
    PingEvent,
    ContentBlockDeltaEvent,
    ContentBlockStopEvent,
    MessageDeltaEvent,
    MessageStopEvent,
    MessageErrorEvent,
)
STREAM_SCHEMAS: tuple[Any, ...] = (CompletionChunk, ChatCompletionChunk, *RESPONSE_EVENTS, *MESSAGE_EVENTS)
