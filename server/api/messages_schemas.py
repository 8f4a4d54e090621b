"""The bodies of /v1/messages and /v1/messages/count_tokens, Anthropic's Messages API for a model of text: as strict as those of
the other generation endpoints. What a request means is decided in ``messages_preparation``."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from server.api.chat_schemas import MAX_MESSAGES
from server.api.request_schemas import MAX_INT, MAX_STOP_CHARACTERS, GenerationBody, Text, TokenCount
from server.api.structured_schemas import SchemaField
from server.api.wire_values import WireModel, wrong_type

MAX_STOP_SEQUENCES = 16

_USE_CHAT = "tools are offered by /v1/chat/completions"
_ELSEWHERE = {"tool_use": _USE_CHAT, "tool_result": _USE_CHAT}


class TextBlock(WireModel):
    type: Literal["text"]
    text: Text
    cache_control: dict[str, Any] | None = Field(None, description="Accepted; common beginnings are cached anyway.")
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


def _check_blocks(value: object) -> object:
    """Text becomes one block. Names the block that is not text; a model of text takes no other."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise wrong_type("expected a string or a list of content blocks")
    if not value:
        raise PydanticCustomError("empty_array", "expected at least one content block, got an empty list")
    for block in value:
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise wrong_type("expected content blocks such as {'type': 'text', 'text': '…'}")
        if kind != "text":
            raise PydanticCustomError(
                "unsupported_value",
                "content blocks of type {kind} are not supported: {reason}",
                {"kind": repr(kind[:40]), "reason": _ELSEWHERE.get(kind, "this server takes text")},
            )
    return value


_BLOCK_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Blocks = Annotated[
    list[TextBlock],
    BeforeValidator(_check_blocks),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK_SCHEMA, "minItems": 1}]}),
]


class InputMessage(WireModel):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class JsonFormat(WireModel):
    type: Literal["json_schema"]
    schema_: SchemaField = Field(alias="schema")


class OutputConfig(WireModel):
    format: JsonFormat | None = Field(None, description="The text follows this JSON schema.")
    effort: str | None = Field(None, description="Accepted; the model has no such setting.")


class Thinking(WireModel):
    type: Literal["disabled", "adaptive", "enabled", "between_tools"]
    budget_tokens: TokenCount | None = None
    display: str | None = None


class CountTokensRequest(WireModel):
    """What makes up a prompt; the rest of a request is accepted and does not change its length."""

    model: str | None = Field(None, max_length=512, description="A served name; the first one when absent.")
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES - 1)]
    system: Blocks | None = None
    tools: list[Any] | None = Field(None, description="Only an empty list.")
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, GenerationBody):
    max_tokens: TokenCount = Field(description="0 computes the prompt only.")
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]], Field(max_length=MAX_STOP_SEQUENCES)]
        | None
    ) = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = Field(None, description="0 or -1: off.")
    seed: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] | None = Field(None, description="An extension.")
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
