"""The bodies of /tokenize and /detokenize, as strict as those of the generation endpoints."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from server.api.generation.chat_messages import MAX_MESSAGES, Message
from server.api.generation.tool_schemas import ToolList
from server.api.generation.wire_values import WireModel, check_num_parts, check_text

MAX_PROMPT_CHARACTERS = 2**20
MAX_TOKENS = 2**20


def _check_tokens(value: object) -> object:
    """By hand: a report about every element of a long list would take seconds. The vocabulary is checked
    later."""
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise PydanticCustomError("invalid_type", "expected a list of token ids")
    if len(value) > MAX_TOKENS:
        limits = {"limit": MAX_TOKENS, "count": len(value)}
        raise PydanticCustomError(
            "array_above_max_length", "expected at most {limit} token ids, got {count}", limits
        )
    return value


TokenList = Annotated[
    Any,
    BeforeValidator(_check_tokens),
    WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MAX_TOKENS}),
]


class TokenizeRequest(WireModel):
    """Either ``prompt`` or ``messages``."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
                for name in ("prompt", "messages")
            ]
        }
    )

    model: str | None = Field(None, max_length=512, description="A served name; the first one when absent.")
    prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS), AfterValidator(check_text)] | None = None
    messages: (
        Annotated[
            list[Message], Field(min_length=1, max_length=MAX_MESSAGES), BeforeValidator(check_num_parts)
        ]
        | None
    ) = None
    add_special_tokens: bool | None = Field(
        None,
        description="False: no beginning-of-sequence token is put in front of the prompt. "
        "A chat always has exactly one.",
    )
    add_generation_prompt: bool | None = Field(None, description="Of messages, as for chat completions.")
    continue_final_message: bool | None = Field(None, description="Of messages, as for chat completions.")
    tools: ToolList | None = Field(None, description="Of messages, as for chat completions.")
    return_token_strs: bool | None = Field(None, description="Adds the text of each token.")


class DetokenizeRequest(WireModel):
    model: str | None = Field(None, max_length=512, description="A served name; the first one when absent.")
    tokens: TokenList
