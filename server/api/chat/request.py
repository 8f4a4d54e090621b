"""The body of chat completions."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from server.api.generation.chat_messages import MAX_MESSAGES, Message
from server.api.generation.request import MAX_LOGPROBS, ChoicesRequest, TokenCount
from server.api.generation.tool_schemas import ToolChoiceField, ToolList
from server.api.generation.wire_values import check_num_parts


class ChatCompletionRequest(ChoicesRequest):
    messages: Annotated[
        list[Message], Field(min_length=1, max_length=MAX_MESSAGES), BeforeValidator(check_num_parts)
    ]
    max_completion_tokens: TokenCount | None = Field(None, description="Wins over max_tokens.")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="Needs logprobs: true."
    )
    add_generation_prompt: bool | None = Field(
        None, description="False: the prompt ends with the last message. Default true."
    )
    continue_final_message: bool | None = Field(
        None,
        description="The answer continues the last message, whose turn stays open; "
        "without a generation prompt.",
    )
    tools: ToolList | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = Field(
        None, description="False: at most one call in an answer. Default true."
    )
