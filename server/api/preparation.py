"""From a checked body to a plan: defaults filled in, ids and lengths checked against the model, text encoded outside the
event loop.

Defaults: the request, then the model's generation_config.json, then OpenAI's. Every refusal is an ApiError that names the field.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from anyio import to_thread

from model.sampling_params import SamplingParams
from server.api.generation import GenerationPlan, PromptPlan
from server.api.request_schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest
from server.engine.loaded import LoadedEngine
from server.errors import ApiError, context_length_exceeded, invalid_request, model_not_found, unsupported_parameter
from server.state import ServerState
from server.text.chat_template import ChatMessage, ChatTemplateError, merge_messages
from server.text.tokenizer import Tokenizer

# Prompts x choices of one request; each is a request of its own in the engine.
MAX_SEQUENCES = 1024
DEFAULT_COMPLETION_TOKENS = 16

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    token_ids: list[int]
    text: str  # as echo shows it; empty where it is not needed


async def prepare_completion(
    state: ServerState, loaded: LoadedEngine, body: CompletionRequest, response_id: str
) -> GenerationPlan:
    _check_common(loaded, body)
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        if body.best_of < n:
            message = f"Invalid value for 'best_of': expected at least n = {n}, got {body.best_of}."
            raise invalid_request(message, param="best_of", code="integer_below_min_value")
        raise unsupported_parameter("best_of", "Leave it out or set it to n.")
    prompts = _prompt_list(body.prompt)
    _check_num_sequences(len(prompts), n, "prompt")
    wants_text = bool(body.echo) or body.logprobs is not None
    encoded = await _in_thread(state, lambda: [_encode_prompt(loaded.tokenizer, prompt, wants_text) for prompt in prompts])
    prompt_logprobs = body.logprobs if body.echo else None
    return _plan(
        state,
        loaded,
        body,
        response_id,
        encoded,
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        prompt_field="prompt",
    )


async def prepare_chat(state: ServerState, loaded: LoadedEngine, body: ChatCompletionRequest, response_id: str) -> GenerationPlan:
    _check_common(loaded, body)
    _check_num_sequences(1, body.n or 1, "messages")
    if body.top_logprobs is not None and not body.logprobs:
        message = "Invalid value for 'top_logprobs': it needs 'logprobs': true."
        raise invalid_request(message, param="top_logprobs", code="invalid_value")
    messages = _chat_messages(body)
    try:
        merged = merge_messages(messages, strict=state.settings.strict_roles)
        token_ids = await _in_thread(state, lambda: loaded.tokenizer.encode_chat(merged))
    except ChatTemplateError as error:
        raise invalid_request(str(error), param=error.param, code="invalid_value") from None
    return _plan(
        state,
        loaded,
        body,
        response_id,
        [EncodedPrompt(token_ids, "")],
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        default_max_tokens=None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=None,
        prompt_field="messages",
    )


def _check_common(loaded: LoadedEngine, body: GenerationRequest) -> None:
    if body.model is not None and body.model not in loaded.model_names:
        raise model_not_found(body.model)
    if body.stream_options is not None and not body.stream:
        message = "The parameter 'stream_options' is allowed only when 'stream' is true."
        raise invalid_request(message, param="stream_options", code="invalid_value")
    num_tokens = loaded.tokenizer.num_tokens
    for token_id in body.stop_token_ids or ():
        if token_id >= num_tokens:
            raise _unknown_token("stop_token_ids", token_id, num_tokens)
    for key in body.logit_bias or ():
        if int(key) >= num_tokens:
            raise _unknown_token("logit_bias", int(key), num_tokens)


def _unknown_token(param: str, token_id: int, num_tokens: int) -> ApiError:
    shown = str(token_id) if -(10**20) < token_id < 10**20 else "a huge integer"
    message = f"Invalid value for '{param}': token ids are 0 to {num_tokens - 1}, got {shown}."
    return invalid_request(message, param=param, code="invalid_value")


def _check_num_sequences(num_prompts: int, n: int, param: str) -> None:
    if num_prompts * n > MAX_SEQUENCES:
        message = f"Invalid value for 'n': {num_prompts} prompts x {n} choices are more than the limit of {MAX_SEQUENCES}."
        raise invalid_request(message, param="n" if n > 1 else param, code="integer_above_max_value")


def _prompt_list(prompt: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt


def _encode_prompt(tokenizer: Tokenizer, prompt: str | list[int], wants_text: bool) -> EncodedPrompt:
    """Text gets one BOS; ids are used as they are."""
    if isinstance(prompt, str):
        return EncodedPrompt(tokenizer.encode(prompt), prompt)
    if min(prompt) < 0 or max(prompt) >= tokenizer.num_known_tokens:
        wrong = next(token_id for token_id in prompt if not 0 <= token_id < tokenizer.num_known_tokens)
        raise _unknown_token("prompt", wrong, tokenizer.num_known_tokens)
    return EncodedPrompt(prompt, tokenizer.decode(prompt) if wants_text else "")


def _chat_messages(body: ChatCompletionRequest) -> list[ChatMessage]:
    messages = []
    for index, message in enumerate(body.messages):
        if message.content is None:
            param = f"messages[{index}].content"
            text = f"Invalid value for '{param}': a message of role '{message.role}' needs text."
            raise invalid_request(text, param=param, code="invalid_type")
        parts = tuple(part.text for part in message.content)
        messages.append(ChatMessage(message.role, parts[0] if len(parts) == 1 else parts))
    return messages


async def _in_thread(state: ServerState, work: Callable[[], Result]) -> Result:
    return await to_thread.run_sync(work, limiter=state.encoding_limiter)


def _plan(
    state: ServerState,
    loaded: LoadedEngine,
    body: GenerationRequest,
    response_id: str,
    prompts: Sequence[EncodedPrompt],
    *,
    max_tokens: int | None,
    default_max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    prompt_field: str,
) -> GenerationPlan:
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        message = f"Invalid value for 'min_tokens': expected at most max_tokens = {max_tokens}, got {min_tokens}."
        raise invalid_request(message, param="min_tokens", code="integer_above_max_value")
    # One draw for the whole request: choices differ by their number, not by their seed.
    seed = secrets.randbits(63) if body.seed is None else body.seed
    plans = []
    for prompt in prompts:
        limit = _fitting_max_tokens(
            loaded.engine.limits.max_model_len,
            len(prompt.token_ids),
            max_tokens,
            default_max_tokens,
            prompt_field,
            strict=state.settings.strict_context,
        )
        sampling = _sampling(state, loaded, body, limit, min(min_tokens, limit), seed, logprobs, prompt_logprobs)
        plans.append(PromptPlan(prompt.token_ids, sampling, prompt.text))
    return GenerationPlan(response_id, tuple(plans), body.n or 1, tuple(body.stop or ()), body.cache_salt)


def _fitting_max_tokens(
    max_model_len: int, num_prompt_tokens: int, asked: int | None, default: int | None, prompt_field: str, *, strict: bool
) -> int:
    """max_tokens, lowered to the room that the prompt leaves. A prompt is never cut: one that leaves no room is an error."""
    room = max_model_len - num_prompt_tokens
    wanted = default if asked is None else asked
    needed = 0 if wanted == 0 else 1
    if room < needed or (strict and asked is not None and asked > room):
        raise context_length_exceeded(max_model_len, num_prompt_tokens, needed if wanted is None else wanted, prompt_field)
    return room if wanted is None else min(wanted, room)


def _sampling(
    state: ServerState,
    loaded: LoadedEngine,
    body: GenerationRequest,
    max_tokens: int,
    min_tokens: int,
    seed: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    temperature = state.effective_default("temperature", 1.0) if body.temperature is None else body.temperature
    top_p = state.effective_default("top_p", 1.0) if body.top_p is None else body.top_p
    top_k = max(0, state.effective_default("top_k", 0) if body.top_k is None else body.top_k)
    if top_p == 0.0:  # the smallest set that reaches a probability of 0: the likeliest token
        top_p, top_k = 1.0, 1
    tokenizer = loaded.tokenizer
    biases = [(int(key), bias) for key, bias in (body.logit_bias or {}).items()]
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=float(temperature),
        top_p=float(top_p),
        top_k=min(int(top_k), tokenizer.num_known_tokens),
        min_p=body.min_p or 0.0,
        seed=seed,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        # An id that the head has and the tokenizer has not is never drawn: nothing to push or to wait for.
        logit_bias=tuple(sorted((token_id, bias) for token_id, bias in biases if token_id < tokenizer.num_known_tokens)),
        stop_token_ids=stop_token_ids(tokenizer, body),
        min_tokens=min_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def stop_token_ids(tokenizer: Tokenizer, body: GenerationRequest) -> frozenset[int]:
    """The model's end tokens, the end of a turn and the request's own; with ignore_eos the last alone. On both endpoints."""
    own = frozenset(token_id for token_id in body.stop_token_ids or () if token_id < tokenizer.num_known_tokens)
    if body.ignore_eos:
        return own
    end_of_turn = () if tokenizer.end_of_turn_id is None else (tokenizer.end_of_turn_id,)
    return own | frozenset(tokenizer.eos_token_ids) | frozenset(end_of_turn)
