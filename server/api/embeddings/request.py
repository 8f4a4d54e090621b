"""The body of /v1/embeddings."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from server.api.generation.request import GenerationBody, Truncation, check_prompts, prompt_schema

MAX_INPUTS = 2048


def _check_input(value: object) -> object:
    return check_prompts(value, MAX_INPUTS)


class EmbeddingRequest(GenerationBody):
    input: Annotated[Any, BeforeValidator(_check_input), prompt_schema(MAX_INPUTS, min_length=1)] = Field(
        description="Text gets one beginning-of-sequence token; token ids are used as they are."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of float32, little-endian."
    )
    dimensions: int | None = Field(None, description="Only the model's own.")
    truncate_prompt_tokens: Truncation | None = Field(
        None,
        description="Keep this many tokens at an input's end (-1: what fits), "
        "and a beginning-of-sequence token in front.",
    )
    user: Annotated[str, Field(max_length=512)] | None = None
