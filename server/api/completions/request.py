"""The body of completions."""

from typing import Annotated

from pydantic import Field

from server.api.generation.request import MAX_BEST_OF, MAX_LOGPROBS, ChoicesRequest, PromptField


class CompletionRequest(ChoicesRequest):
    prompt: PromptField = Field(
        description="Text gets one beginning-of-sequence token and may hold control tokens; "
        "token ids are used as they are."
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None,
        description="Alternatives beside each token; raw log-probabilities, before temperature, "
        "penalties and bias.",
    )
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=0, le=MAX_BEST_OF)] | None = Field(
        None,
        description="Draw so many choices per prompt and return the n of the highest mean log-probability. "
        "Not with stream.",
    )
