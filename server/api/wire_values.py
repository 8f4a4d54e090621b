"""What the models of all bodies are made of: a strict base, and checks of their own that name the fault."""

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
