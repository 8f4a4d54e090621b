"""Shapes of the answers of Anthropic's Messages API, for the OpenAPI description; ``answers`` has the other
ones."""

from typing import Any, Literal

from pydantic import BaseModel


class MessageText(BaseModel):
    type: Literal["text"]
    text: str


class MessageToolUse(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(BaseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageResponse(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageText | MessageToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class CountTokensResponse(BaseModel):
    input_tokens: int


class MessagesErrorDetail(BaseModel):
    type: str
    message: str


class MessagesErrorResponse(BaseModel):
    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str
