"""The body of /v1/responses. Nothing is stored: what would need an earlier response or a later question is
refused by name (see ``unsupported``); what has no meaning here is accepted. Items of ``input`` may be the
model's own from earlier turns."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from server.api.generation.chat_messages import MAX_MESSAGES
from server.api.generation.request import MAX_LOGPROBS, GenerationRequest, Text, TokenCount
from server.api.generation.tool_schemas import MAX_TOOLS, FunctionDefinition, ToolChoiceField, TypedTool
from server.api.generation.wire_values import JsonObject, WireModel, check_num_parts, check_text, wrong_type

_LOGPROBS = "message.output_text.logprobs"
# What belongs to kinds of input and output that are not here is never there to be included.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
_TEXT_KINDS = frozenset({"input_text", "output_text", "text", "refusal"})
_ITEM_KINDS = frozenset({"message", "function_call", "function_call_output"})


def _check_parts(value: object) -> object:
    """Text becomes one part. Names the part that is not text; a model of text takes no other."""
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    if not isinstance(value, list):
        raise wrong_type("expected a string or a list of content parts")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise wrong_type("expected content parts such as {'type': 'input_text', 'text': '…'}")
        if kind not in _TEXT_KINDS:
            raise _unsupported("content parts", kind)
    return value


def _check_item(value: object) -> object:
    """Every item gets its type: a plain message may leave it out. The kind decides which fields it has."""
    if not isinstance(value, dict):
        raise wrong_type("expected an item such as {'role': 'user', 'content': '…'}")
    kind = "message" if value.get("type") is None else value["type"]
    if not isinstance(kind, str):
        raise wrong_type("expected the type of an item as a string")
    if kind not in _ITEM_KINDS:
        raise _unsupported("items", kind)
    return {**value, "type": kind}


def _unsupported(what: str, kind: str) -> PydanticCustomError:
    text = (
        "{what} of type {kind} are not supported: this server takes text and calls of functions, "
        "and stores nothing"
    )
    return PydanticCustomError("unsupported_value", text, {"what": what, "kind": repr(kind[:40])})


def _check_input(value: object) -> object:
    """Text becomes one message of the user."""
    if isinstance(value, str):
        return [{"role": "user", "content": check_text(value)}]
    if not isinstance(value, list):
        raise wrong_type("expected a string or a list of items")
    if not value:
        raise PydanticCustomError("empty_array", "expected at least one item, got an empty list")
    return check_num_parts(value)


class ResponseTextPart(WireModel):
    type: Literal["input_text", "output_text", "text", "refusal"]
    text: Text | None = None
    refusal: Text | None = None
    # Of parts that this server, or OpenAI's, wrote.
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


_ITEMS_SCHEMA = {
    "type": "array",
    "items": {"$ref": "#/components/schemas/ResponseItem"},
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
}
_PARTS_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"$ref": "#/components/schemas/ResponseTextPart"}},
    ]
}
Parts = Annotated[list[ResponseTextPart], BeforeValidator(_check_parts), WithJsonSchema(_PARTS_SCHEMA)]
CallId = Annotated[str, Field(max_length=512)]


class ResponseItem(WireModel):
    """One of three kinds. Which fields a kind needs is checked where it is read."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Parts | None = None
    call_id: CallId | None = None
    name: Annotated[str, Field(min_length=1, max_length=512), AfterValidator(check_text)] | None = None
    arguments: Text | None = None
    output: Parts | None = None
    # Of items that this server, or OpenAI's, wrote.
    id: str | None = None
    status: str | None = None
    phase: str | None = None


Item = Annotated[ResponseItem, BeforeValidator(_check_item)]
Input = Annotated[
    list[Item],
    BeforeValidator(_check_input),
    Field(max_length=MAX_MESSAGES),
    WithJsonSchema({"anyOf": [{"type": "string"}, _ITEMS_SCHEMA]}),
]


class ResponseTool(FunctionDefinition, TypedTool):
    """The type is checked first: tools of other types have no name."""


class ResponseTextFormat(WireModel):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=512)] | None = None
    description: str | None = Field(None, description="Accepted; the model does not see it.")
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="The schema is enforced either way.")


class ResponseTextOptions(WireModel):
    format: ResponseTextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(WireModel):
    include_obfuscation: bool | None = Field(None, description="Accepted; nothing is padded.")


class ResponseRequest(GenerationRequest):
    input: Input
    instructions: Text | None = Field(None, description="A system message in front of the input.")
    max_output_tokens: TokenCount | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = Field(
        None, description="False: at most one call in an answer. Default true."
    )
    text: ResponseTextOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[Includable], Field(max_length=16)] | None = Field(
        None,
        description=f"{_LOGPROBS} adds log-probabilities; what belongs to other kinds of output is accepted.",
    )
    truncation: Literal["disabled"] | None = None
    stream_options: ResponseStreamOptions | None = None
    max_tool_calls: int | None = Field(None, description="Accepted; it counts tools that run on the server.")

    @property
    def shows_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())
