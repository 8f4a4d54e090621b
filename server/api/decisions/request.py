"""The body of /v1/decisions: some input, as items of /v1/responses, and typed questions about it. What a
question is to the model is decided in ``decision_questions``."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from server.api.generation.chat_messages import MAX_MESSAGES
from server.api.generation.request import GenerationBody
from server.api.generation.wire_values import WireModel, check_finite, check_num_parts, check_text, wrong_type
from server.api.responses.request import Item, ResponseItem
from server.http.json_response import encode_json

MAX_QUESTIONS = 400
MAX_OPTIONS = 255
MAX_LEVELS = 10
MAX_OPTION_CHARACTERS = 4096
MAX_INSTRUCTION_CHARACTERS = 64 * 1024
_ITEM_CHARACTERS = 32

ShortText = Annotated[str, Field(max_length=MAX_OPTION_CHARACTERS), AfterValidator(check_text)]
Name = Annotated[str, Field(max_length=512), AfterValidator(check_text)]


def _with_json_as_text(parts: list[Any]) -> list[Any]:
    """Parts of JSON become text."""
    return [
        _json_text(part) if isinstance(part, dict) and part.get("type") == "input_json" else part
        for part in parts
    ]


def _json_text(part: dict[str, Any]) -> dict[str, Any]:
    data = part.get("data")
    if not isinstance(data, dict) and not (
        isinstance(data, list) and all(isinstance(item, dict) for item in data)
    ):
        raise wrong_type("expected the 'data' of input_json as an object or a list of objects")
    check_finite({"data": data})
    return {"type": "input_text", "text": encode_json(data).decode()}


def _check_item(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {
        name: _with_json_as_text(content)
        if name in ("content", "output") and isinstance(content, list)
        else content
        for name, content in value.items()
    }


def _check_input(value: object) -> object:
    """Text becomes one message of the user."""
    if isinstance(value, str):
        return [{"role": "user", "content": check_text(value)}]
    if not isinstance(value, list):
        raise wrong_type("expected a string or a list of items")
    if not value:
        raise PydanticCustomError("empty_array", "expected at least one item, got an empty list")
    check_num_parts(value)
    return [_check_item(item) for item in value]


def _check_instructions(value: object) -> object:
    """Parts of text and of JSON are joined."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in _with_json_as_text(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise wrong_type("expected parts such as {'type': 'input_text', 'text': '…'}")
        if kind != "input_text" or not isinstance(part.get("text"), str):
            raise PydanticCustomError(
                "unsupported_value",
                "parts of type {kind} are not supported: this server takes text",
                {"kind": repr(kind[:40])},
            )
        texts.append(part["text"])
    return "\n\n".join(texts)


_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["input_text", "input_json"]}},
    "required": ["type"],
}
_ITEMS = {
    "type": "array",
    "items": {"$ref": "#/components/schemas/ResponseItem"},
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
}
Instructions = Annotated[
    str,
    Field(min_length=1, max_length=MAX_INSTRUCTION_CHARACTERS),
    AfterValidator(check_text),
    BeforeValidator(_check_instructions),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": MAX_INSTRUCTION_CHARACTERS},
                {"type": "array", "items": _PART, "minItems": 1},
            ]
        }
    ),
]


def _check_value(value: object) -> object:
    """By hand: a report about a union would name its members."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise wrong_type("expected a text or a boolean")
    if len(value) > MAX_OPTION_CHARACTERS:
        limits = {"limit": MAX_OPTION_CHARACTERS, "count": len(value)}
        raise PydanticCustomError(
            "string_above_max_length", "expected at most {limit} characters, got {count}", limits
        )
    return check_text(value)


_VALUE = {"anyOf": [{"type": "string", "maxLength": MAX_OPTION_CHARACTERS}, {"type": "boolean"}]}


class DecisionChoice(WireModel):
    value: Annotated[Any, BeforeValidator(_check_value), WithJsonSchema(_VALUE)]
    description: ShortText | None = None


class DecisionLevel(WireModel):
    label: ShortText
    description: ShortText | None = None


def _check_choices(value: list[DecisionChoice]) -> list[DecisionChoice]:
    """A text and a boolean that is written like it are two values."""
    if len({(type(choice.value), choice.value) for choice in value}) < len(value):
        raise PydanticCustomError("invalid_value", "expected choices of different values")
    return value


def _kind(kind: str, owns: str | None = None) -> dict[str, Any]:
    """What a type of question must have, and what it can't have."""
    options = {name: {"type": "array" if name == owns else "null"} for name in ("choices", "levels")}
    return {
        "properties": {"type": {"const": kind}, **options},
        "required": ["type", *([owns] if owns else [])],
    }


class DecisionQuestion(WireModel):
    """``choices`` belong to a choice, ``levels`` to a score; a predicate has neither."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [_kind("predicate"), _kind("choice", "choices"), _kind("score", "levels")]
        }
    )

    type: Literal["predicate", "choice", "score"]
    instructions: Instructions
    name: Name | None = Field(None, description="Repeated in the answer.")
    choices: (
        Annotated[
            list[DecisionChoice], Field(min_length=2, max_length=MAX_OPTIONS), AfterValidator(_check_choices)
        ]
        | None
    ) = None
    levels: Annotated[list[DecisionLevel], Field(min_length=2, max_length=MAX_LEVELS)] | None = Field(
        None, description="From the lowest to the highest."
    )


class DecisionRequest(GenerationBody):
    input: Annotated[
        list[Item],
        BeforeValidator(_check_input),
        Field(max_length=MAX_MESSAGES),
        WithJsonSchema({"anyOf": [{"type": "string"}, _ITEMS]}),
    ]
    questions: Annotated[list[DecisionQuestion], Field(min_length=1, max_length=MAX_QUESTIONS)]
    # Known to OpenAI's API and without meaning here.
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None


def num_characters(items: list[ResponseItem]) -> int:
    """Of what becomes the input of every question. Items and parts count as some too: without any text they
    are work as well."""
    parts = [part for item in items for part in (*(item.content or ()), *(item.output or ()))]
    texts = [text for part in parts for text in (part.text, part.refusal)]
    texts += [text for item in items for text in (item.name, item.arguments)]
    return sum(len(text or "") for text in texts) + _ITEM_CHARACTERS * (len(items) + len(parts))
