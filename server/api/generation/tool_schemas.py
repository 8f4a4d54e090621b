"""Functions that a client offers to the model, and which of them it wants called, as chat completions spell
them. Responses spell a function without the inner object; the choice is read in either spelling."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from server.api.generation.wire_values import JsonObject, WireModel, check_text, wrong_type

MAX_TOOLS = 512
MAX_NAME_CHARACTERS = 128  # of a function in Responses and in Anthropic's API; chats of OpenAI end at 64
MAX_DESCRIPTION_CHARACTERS = 64 * 1024
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_MODES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """``names``: the only functions that may be called, None for all. ``is_named``: exactly the one of them
    must be."""

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] | None = None
    is_named: bool = False


def _check_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise PydanticCustomError("invalid_value", "expected a name of letters, digits, '_' and '-'")
    return value


def _check_choice(value: object) -> object:
    if isinstance(value, str):
        if value not in _MODES:
            raise PydanticCustomError(
                "invalid_value", "expected 'none', 'auto', 'required' or an object that names a function"
            )
        return ToolChoice(value)  # type: ignore[arg-type]  # one of the modes
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str):
        raise wrong_type("expected 'none', 'auto', 'required' or an object such as {'type': 'function', …}")
    if kind == "function":
        return ToolChoice("required", (_chosen_name(value),), is_named=True)
    if kind == "allowed_tools":
        return _allowed(value.get("allowed_tools", value))
    raise _unsupported_type(kind)


def _allowed(value: object) -> ToolChoice:
    mode, tools = (value.get("mode"), value.get("tools")) if isinstance(value, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise wrong_type("expected allowed_tools with the mode 'auto' or 'required' and a list of tools")
    return ToolChoice(mode, tuple(_chosen_name(tool) for tool in tools))


def _chosen_name(value: object) -> str:
    if isinstance(value, dict):
        kind = value.get("type", "function")
        if kind != "function":
            raise _unsupported_type(str(kind))
        function = value.get("function", value)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return name
    raise wrong_type(
        "expected the name of a function, such as {'type': 'function', 'function': {'name': 'f'}}"
    )


def _check_type(value: object) -> object:
    """Names the kind of tool that is not here."""
    if isinstance(value, str) and value != "function":
        raise _unsupported_type(value)
    return value


def _unsupported_type(kind: str) -> PydanticCustomError:
    text = "tools of type {kind} are not supported: this server takes functions"
    return PydanticCustomError("unsupported_value", text, {"kind": repr(kind[:40])})


ToolType = Annotated[Literal["function"], BeforeValidator(_check_type)]
FunctionName = Annotated[
    str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS), AfterValidator(_check_name)
]
ToolChoiceField = Annotated[
    Any,
    BeforeValidator(_check_choice),
    WithJsonSchema({"anyOf": [{"enum": list(_MODES)}, {"type": "object", "required": ["type"]}]}),
]


class FunctionDefinition(WireModel):
    name: FunctionName
    description: (
        Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARACTERS), AfterValidator(check_text)] | None
    ) = None
    parameters: JsonObject | None = Field(
        None, description="The JSON schema of the arguments, an object; none: no arguments."
    )
    strict: bool | None = Field(
        None, description="Accepted; calls that must be made follow the schema either way."
    )


class TypedTool(WireModel):
    type: ToolType


class Tool(TypedTool):
    function: FunctionDefinition


ToolList = Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)]
