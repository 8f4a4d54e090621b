"""What bodies and answers are made of: a strict base for models, checks that name the fault, the head of an
answer."""

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

MAX_PARTS = 16_384


class WireModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


def wrong_type(what: str) -> PydanticCustomError:
    return PydanticCustomError("invalid_type", "{what}", {"what": what})


def check_text(value: str) -> str:
    """Limits of length go before it: behind a check of our own pydantic takes any text for a list."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise PydanticCustomError(
            "invalid_value", "the text holds a lone surrogate and is not valid Unicode"
        ) from None
    return value


def check_finite(value: dict[str, Any]) -> dict[str, Any]:
    """Of an object of any form: JSON can spell numbers, such as 1e999, that it can't carry as values."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise PydanticCustomError("invalid_value", "expected finite numbers in it") from None
    return value


def check_num_parts(value: object) -> object:
    """Of messages or items, before any is looked at: each of their parts, blocks and calls takes time of the
    event loop, and those without text have no other limit."""
    count = _num_parts(value) if isinstance(value, list) else 0
    if count > MAX_PARTS:
        limits = {"limit": MAX_PARTS, "count": count}
        raise PydanticCustomError(
            "array_above_max_length",
            "expected at most {limit} parts and calls in all of it, got {count}",
            limits,
        )
    return value


def _num_parts(items: list[Any]) -> int:
    lists = [
        item.get(name)
        for item in items
        if isinstance(item, dict)
        for name in ("content", "output", "tool_calls")
    ]
    return sum(len(parts) + _num_parts(parts) for parts in lists if isinstance(parts, list))


JsonObject = Annotated[dict[str, Any], AfterValidator(check_finite)]


def optional(absent: str | None, description: str | None = None) -> Any:
    """For the annotation of a field that an answer may lack: readers take ``absent`` for it then."""
    return Field(description=description, json_schema_extra={"default": absent})


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What every chunk of a stream, or the one answer, repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str
