"""What bodies and answers are made of: a strict base for models, checks that name the fault, JSON as it is sent."""

import json
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class WireModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


def wrong_type(what: str) -> PydanticCustomError:
    return PydanticCustomError("invalid_type", "{what}", {"what": what})


def check_text(value: str) -> str:
    """Limits of length go before it: behind a check of our own pydantic takes any text for a list."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise PydanticCustomError("invalid_value", "the text holds a lone surrogate and is not valid Unicode") from None
    return value


def encode_json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What every chunk of a stream, or the one answer, repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str
