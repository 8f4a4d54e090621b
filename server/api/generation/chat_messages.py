"""Messages of a chat: text, calls of functions and their results."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from server.api.generation.request import Text
from server.api.generation.wire_values import WireModel, check_text, wrong_type

MAX_MESSAGES = 4096


class TextPart(WireModel):
    type: Literal["text"]
    text: Text


def _check_content(value: object) -> object:
    """Text becomes one part. Names the part that is not text; a model of text takes no other."""
    if value is None:
        return value
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise wrong_type("expected a string or a list of content parts")
    if not value:
        raise PydanticCustomError("empty_array", "expected at least one content part, got an empty list")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise wrong_type("expected content parts such as {'type': 'text', 'text': '…'}")
        if kind != "text":
            raise PydanticCustomError(
                "unsupported_value",
                "content parts of type {kind} are not supported: this server takes text",
                {"kind": repr(kind[:40])},
            )
    return value


_TEXT_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Content = Annotated[
    list[TextPart],
    BeforeValidator(_check_content),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART_SCHEMA, "minItems": 1}]}
    ),
]


class CalledFunction(WireModel):
    name: Annotated[str, Field(min_length=1, max_length=512), AfterValidator(check_text)]
    arguments: Text


class MessageCall(WireModel):
    id: Annotated[str, Field(max_length=512)]
    type: Literal["function"]
    function: CalledFunction


class Message(WireModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = Field(None, description="May be missing where an assistant called functions.")
    name: Annotated[str, Field(max_length=512)] | None = Field(
        None, description="Accepted; the model has no place for it."
    )
    tool_calls: Annotated[list[MessageCall], Field(max_length=MAX_MESSAGES)] | None = Field(
        None, description="Of an assistant: the functions that it called."
    )
    tool_call_id: Annotated[str, Field(max_length=512)] | None = Field(
        None, description="Of role tool: which call this is the result of."
    )
    # Present with null in answers that clients send back.
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
