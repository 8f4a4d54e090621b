"""The bodies of /v1/messages and /v1/messages/count_tokens, Anthropic's Messages API for a model of text: as
strict as those of the other generation endpoints. What a request means is decided in
``messages_preparation``."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from server.api.generation.chat_messages import MAX_MESSAGES
from server.api.generation.request import MAX_INT, MAX_STOP_CHARACTERS, GenerationBody, Text, TokenCount
from server.api.generation.structured_schemas import SchemaField
from server.api.generation.tool_schemas import MAX_DESCRIPTION_CHARACTERS, MAX_TOOLS, FunctionName
from server.api.generation.wire_values import JsonObject, WireModel, check_num_parts, check_text, wrong_type

MAX_STOP_SEQUENCES = 16

_KINDS = ("text", "tool_use", "tool_result")
BlockId = Annotated[str, Field(min_length=1, max_length=512)]
CacheControl = Annotated[dict[str, Any], Field(description="Accepted; common beginnings are cached anyway.")]


def _check_blocks(value: object, kinds: tuple[str, ...]) -> object:
    """Text becomes one block. Names the block that is not here."""
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
        if kind not in kinds:
            raise PydanticCustomError(
                "unsupported_value",
                "content blocks of type {kind} are not supported here: this server takes {kinds}",
                {"kind": repr(kind[:40]), "kinds": " and ".join(kinds)},
            )
    return value


def _check_text_blocks(value: object) -> object:
    return _check_blocks(value, ("text",))


def _check_any_blocks(value: object) -> object:
    return _check_blocks(value, _KINDS)


def _block_schema(kind: str, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    fields = {"type": {"const": kind}, **properties}
    return {"type": "object", "properties": fields, "required": ["type", *required]}


def _blocks_schema(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": list(blocks)}, "minItems": 1}]}


_ID_SCHEMA = {"type": "string", "minLength": 1, "maxLength": 512}
_TEXT_SCHEMA = _block_schema("text", ("text",), text={"type": "string"})
_CALL_SCHEMA = _block_schema(
    "tool_use", ("id", "name", "input"), id=_ID_SCHEMA, name=_ID_SCHEMA, input={"type": "object"}
)
_RESULT_SCHEMA = _block_schema(
    "tool_result",
    ("tool_use_id",),
    tool_use_id=_ID_SCHEMA,
    content={
        "anyOf": [*_blocks_schema(_TEXT_SCHEMA)["anyOf"], {"type": "array", "maxItems": 0}, {"type": "null"}]
    },
    is_error={"type": ["boolean", "null"]},
)


class TextBlock(WireModel):
    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


def _check_result(value: object) -> object:
    """The result of a call may be empty."""
    return value if value == [] else _check_text_blocks(value)


class ContentBlock(WireModel):
    """One of three kinds. Which fields a kind needs is checked where it is read."""

    type: Literal["text", "tool_use", "tool_result"]
    text: Text | None = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None
    # Of a call.
    id: Annotated[BlockId, AfterValidator(check_text)] | None = None
    name: Annotated[BlockId, AfterValidator(check_text)] | None = None
    input: JsonObject | None = None
    # Of the result of one.
    tool_use_id: Annotated[BlockId, AfterValidator(check_text)] | None = None
    content: Annotated[list[TextBlock], BeforeValidator(_check_result)] | None = None
    is_error: bool | None = None
    # Accepted; the client's side of tools has no more to say.
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None
    toolset_name: None = None


Blocks = Annotated[
    list[TextBlock], BeforeValidator(_check_text_blocks), WithJsonSchema(_blocks_schema(_TEXT_SCHEMA))
]
AnyBlocks = Annotated[
    list[ContentBlock],
    BeforeValidator(_check_any_blocks),
    Field(max_length=MAX_MESSAGES),
    WithJsonSchema(_blocks_schema(_TEXT_SCHEMA, _CALL_SCHEMA, _RESULT_SCHEMA)),
]


class InputMessage(WireModel):
    role: Literal["user", "assistant", "system"]
    content: AnyBlocks


def _check_tool_type(value: object) -> object:
    """Names the kind of tool that is not here."""
    if isinstance(value, str) and value != "custom":
        text = "tools of type {kind} are not supported: this server takes those that the client runs itself"
        raise PydanticCustomError("unsupported_value", text, {"kind": repr(value[:40])})
    return value


class MessagesTool(WireModel):
    # The type is checked first: tools of other types have no schema.
    type: Annotated[Literal["custom"] | None, BeforeValidator(_check_tool_type)] = None
    name: FunctionName
    description: (
        Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARACTERS), AfterValidator(check_text)] | None
    ) = None
    input_schema: JsonObject = Field(description="The JSON schema of the input, an object.")
    strict: bool | None = Field(
        None, description="Accepted; calls that must be made follow the schema either way."
    )
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = Field(
        None, description="Accepted; inputs are sent as they are written."
    )


class MessagesToolChoice(WireModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Field(max_length=512)] | None = Field(None, description="Of type tool.")
    disable_parallel_tool_use: bool | None = Field(None, description="At most one call in an answer.")


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
    messages: Annotated[
        list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES), BeforeValidator(check_num_parts)
    ]
    system: Blocks | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(CountTokensRequest, GenerationBody):
    max_tokens: TokenCount = Field(description="0 computes the prompt only.")
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
            Field(max_length=MAX_STOP_SEQUENCES),
        ]
        | None
    ) = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = Field(None, description="0 or -1: off.")
    seed: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] | None = Field(None, description="An extension.")
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
