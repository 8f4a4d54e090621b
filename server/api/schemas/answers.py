"""Shapes of the answers, for the OpenAPI description. Answers themselves are written in the folders of the
endpoints."""

from typing import Any, Literal

from pydantic import BaseModel, Field


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class UsageSchema(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class LegacyLogprobsSchema(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


# One entry per token of the prompt, by token id; null for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Timings(BaseModel):
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: LegacyLogprobsSchema | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] = Field(default_factory=list, description="With return_token_ids.")
    prompt_token_ids: list[int] = Field(default_factory=list, description="With return_token_ids.")
    prompt_logprobs: PromptLogprobs = Field(default_factory=list, description="With prompt_logprobs.")


class CompletionResponse(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageSchema
    timings: Timings | None = Field(None, description="With return_timings.")


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob] | None
    refusal: None


class CalledFunctionSchema(BaseModel):
    name: str
    arguments: str


class ToolCallSchema(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunctionSchema


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallSchema] = Field(default_factory=list, description="Where functions were called.")


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] = Field(default_factory=list, description="With return_token_ids.")


class ChatCompletionResponse(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageSchema
    timings: Timings | None = Field(None, description="With return_timings.")
    prompt_token_ids: list[int] = Field(default_factory=list, description="With return_token_ids.")
    prompt_logprobs: PromptLogprobs = Field(default_factory=list, description="With prompt_logprobs.")


class ResponseInputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class ResponseOutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsageSchema(BaseModel):
    input_tokens: int
    input_tokens_details: ResponseInputTokensDetails
    output_tokens: int
    output_tokens_details: ResponseOutputTokensDetails
    total_tokens: int


class ResponseOutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class ResponseOutputMessage(BaseModel):
    id: str
    type: Literal["message"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[ResponseOutputText]


class ResponseFunctionCall(BaseModel):
    id: str
    type: Literal["function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class ResponseErrorSchema(BaseModel):
    code: str
    message: str


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseErrorSchema | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[ResponseOutputMessage | ResponseFunctionCall]
    usage: ResponseUsageSchema | None
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, None]
    service_tier: str
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingsUsage


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    default_sampling: dict[str, Any]


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizerInfo(BaseModel):
    bos_token: str
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    add_bos_token: bool
    model_max_length: int
    chat_template: str


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(BaseModel):
    prompt: str


class HealthResponse(BaseModel):
    status: Literal["ok", "loading", "stalled", "draining", "dead"]
    phase: str | None = None


class VersionResponse(BaseModel):
    name: str
    version: str
