"""From a checked body to a plan: defaults filled in, ids and lengths checked against the model, prompts encoded.

Defaults: the request, then the model's generation_config.json, then OpenAI's. Every refusal is an ApiError that names the field.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from model.grammar_state import Grammar
from model.sampling_params import SamplingParams
from server.admission import Ticket
from server.api.generation import GenerationPlan, PromptPlan
from server.api.priority import checked_priority
from server.api.prompts import (
    EncodedPrompt,
    check_token_ids,
    encode_chat,
    encode_prompt,
    in_thread,
    prompt_list,
    truncated,
    unknown_token,
)
from server.api.request_schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest
from server.api.structured_output import compile_grammar
from server.engine.loaded import LoadedEngine
from server.errors import ApiError, context_length_exceeded, invalid_request, model_not_found
from server.state import ServerState
from server.text.length_bound import PromptTooLongError
from server.text.tokenizer import Tokenizer

# Prompts x choices of one request; each is a request of its own in the engine.
MAX_SEQUENCES = 1024
DEFAULT_COMPLETION_TOKENS = 16


async def prepare_completion(
    state: ServerState, loaded: LoadedEngine, body: CompletionRequest, response_id: str, ticket: Ticket
) -> GenerationPlan:
    _check_common(loaded, body, has_logprobs=body.logprobs is not None)
    n = body.n or 1
    num_candidates = _num_candidates(body, n)
    prompts = prompt_list(body.prompt)
    _check_num_sequences(len(prompts), num_candidates, "prompt", "n" if num_candidates == n else "best_of")
    limit = _truncation(loaded, body, body.max_tokens, DEFAULT_COMPLETION_TOKENS)
    ticket.admit(len(prompts) * num_candidates, _least_num_tokens(loaded, prompts, limit, body.max_tokens))
    grammar = await compile_grammar(loaded, body, state.metrics)
    encode = partial(
        encode_prompt,
        loaded.tokenizer,
        limit=limit,
        wants_text=bool(body.echo) or body.logprobs is not None,
        skip_special_tokens=body.skip_special_tokens is not False,
    )
    encoded = await in_thread(state, lambda: [encode(prompt) for prompt in prompts])
    logprobs = 0 if num_candidates > n and body.logprobs is None else body.logprobs
    echoed = body.logprobs if body.echo else None
    plan = _plan(
        state,
        loaded,
        body,
        response_id,
        encoded,
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        logprobs=logprobs,
        # One run of the prompt serves both; each form shows as many alternatives as it was asked for.
        prompt_logprobs=max((count for count in (echoed, body.prompt_logprobs) if count is not None), default=None),
        prompt_field="prompt",
        grammar=grammar,
    )
    return replace(plan, n=num_candidates, num_best=n if num_candidates > n else None)


def _num_candidates(body: CompletionRequest, n: int) -> int:
    """How many choices per prompt are drawn: best_of, of which the best n are returned."""
    if body.best_of is None:
        return n
    if body.best_of < n:
        message = f"Invalid value for 'best_of': expected at least n = {n}, got {body.best_of}."
        raise invalid_request(message, param="best_of", code="integer_below_min_value")
    if body.best_of > n and body.stream:
        message = "Invalid value for 'best_of': with 'stream' the best choice is not known before its end; leave one of them out."
        raise invalid_request(message, param="best_of", code="invalid_value")
    return body.best_of


async def prepare_chat(
    state: ServerState, loaded: LoadedEngine, body: ChatCompletionRequest, response_id: str, ticket: Ticket
) -> GenerationPlan:
    _check_common(loaded, body, has_logprobs=bool(body.logprobs))
    _check_num_sequences(1, body.n or 1, "messages", "n")
    if body.top_logprobs is not None and not body.logprobs:
        message = "Invalid value for 'top_logprobs': it needs 'logprobs': true."
        raise invalid_request(message, param="top_logprobs", code="invalid_value")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    limit = _truncation(loaded, body, max_tokens, 1)
    ticket.admit(body.n or 1, 0)
    grammar = await compile_grammar(loaded, body, state.metrics)
    try:
        token_ids = await encode_chat(
            state,
            loaded.tokenizer,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            max_tokens=loaded.engine.limits.max_model_len if limit is None else None,
        )
    except PromptTooLongError as error:
        raise _hopeless(loaded, error.num_tokens, 1 if max_tokens is None else max_tokens, "messages") from None
    return _plan(
        state,
        loaded,
        body,
        response_id,
        [EncodedPrompt(truncated(token_ids, limit, loaded.tokenizer.bos_token_id), "")],
        max_tokens=max_tokens,
        default_max_tokens=None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        prompt_field="messages",
        grammar=grammar,
    )


def _check_common(loaded: LoadedEngine, body: GenerationRequest, *, has_logprobs: bool) -> None:
    if body.model is not None and body.model not in loaded.model_names:
        raise model_not_found(body.model)
    if body.stream_options is not None and not body.stream:
        message = "The parameter 'stream_options' is allowed only when 'stream' is true."
        raise invalid_request(message, param="stream_options", code="invalid_value")
    num_tokens = loaded.tokenizer.num_tokens
    for token_id in body.stop_token_ids or ():
        if token_id >= num_tokens:
            raise unknown_token("stop_token_ids", token_id, num_tokens)
    for key in body.logit_bias or ():
        if int(key) >= num_tokens:
            raise unknown_token("logit_bias", int(key), num_tokens)
    for token_id in body.allowed_token_ids or ():
        if token_id >= num_tokens:
            raise unknown_token("allowed_token_ids", token_id, num_tokens)
    if body.prompt_logprobs is not None and body.stream:
        message = "Invalid value for 'prompt_logprobs': they are not sent with 'stream'; leave one of them out."
        raise invalid_request(message, param="prompt_logprobs", code="invalid_value")
    check_token_ids(loaded.tokenizer, body.logprob_token_ids or (), "logprob_token_ids")
    if body.logprob_token_ids and not has_logprobs:
        message = "Invalid value for 'logprob_token_ids': it needs 'logprobs'."
        raise invalid_request(message, param="logprob_token_ids", code="invalid_value")


def _check_num_sequences(num_prompts: int, n: int, param: str, count_param: str) -> None:
    if num_prompts * n > MAX_SEQUENCES:
        message = (
            f"Invalid value for '{count_param}': {num_prompts} prompts x {n} choices are more than the limit of {MAX_SEQUENCES}."
        )
        raise invalid_request(message, param=count_param if n > 1 else param, code="integer_above_max_value")


def _least_num_tokens(loaded: LoadedEngine, prompts: Sequence[str | list[int]], limit: int | None, max_tokens: int | None) -> int:
    """A lower bound of the tokens of all prompts, before anything is encoded. ``limit``: see ``truncated``. Raises ApiError when
    a text cannot fit."""
    total = 0
    for prompt in prompts:
        least = loaded.tokenizer.least_num_tokens(prompt) if isinstance(prompt, str) else len(prompt)
        if limit is not None:
            least = min(least, limit)
        elif isinstance(prompt, str) and least > loaded.engine.limits.max_model_len:
            raise _hopeless(loaded, least, DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens, "prompt")
        total += least
    return total


def _hopeless(loaded: LoadedEngine, least: int, max_tokens: int, param: str) -> ApiError:
    return context_length_exceeded(loaded.engine.limits.max_model_len, least, max_tokens, param, is_bound=True)


def _truncation(loaded: LoadedEngine, body: GenerationRequest, max_tokens: int | None, default_max_tokens: int) -> int | None:
    """The most tokens a prompt keeps; None when nothing is to be cut. -1 leaves room for max_tokens."""
    asked = body.truncate_prompt_tokens
    if asked != -1:
        return asked
    wanted = default_max_tokens if max_tokens is None else max_tokens
    return max(1, loaded.engine.limits.max_model_len - wanted)


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
    grammar: Grammar | None,
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
    return GenerationPlan(
        response_id,
        tuple(plans),
        body.n or 1,
        tuple(body.stop or ()),
        body.cache_salt,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        grammar=grammar,
        priority=checked_priority(state.settings, body.priority),
        shows_timings=bool(body.return_timings),
    )


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
    stop_ids = stop_token_ids(tokenizer, body)
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
        allowed_token_ids=_allowed_token_ids(tokenizer, body, stop_ids, min_tokens),
        stop_token_ids=stop_ids,
        min_tokens=min_tokens,
        logprobs=logprobs,
        logprob_token_ids=tuple(dict.fromkeys(body.logprob_token_ids)) if body.logprob_token_ids else None,
        prompt_logprobs=prompt_logprobs,
    )


def _allowed_token_ids(
    tokenizer: Tokenizer, body: GenerationRequest, stop_ids: frozenset[int], min_tokens: int
) -> tuple[int, ...] | None:
    """Refuses what leaves no token to draw: ids without a token, or end tokens alone while min_tokens keeps them out."""
    if body.allowed_token_ids is None:
        return None
    allowed = {token_id for token_id in body.allowed_token_ids if token_id < tokenizer.num_known_tokens}
    if not (allowed - stop_ids if min_tokens > 0 else allowed):
        message = "Invalid value for 'allowed_token_ids': no token is left to draw (ids without a token"
        message += ", end tokens before 'min_tokens')." if min_tokens > 0 else ")."
        raise invalid_request(message, param="allowed_token_ids", code="invalid_value")
    return tuple(sorted(allowed))


def stop_token_ids(tokenizer: Tokenizer, body: GenerationRequest) -> frozenset[int]:
    """The model's end tokens, the end of a turn and the request's own; with ignore_eos the last alone. On both endpoints."""
    own = frozenset(token_id for token_id in body.stop_token_ids or () if token_id < tokenizer.num_known_tokens)
    if body.ignore_eos:
        return own
    end_of_turn = () if tokenizer.end_of_turn_id is None else (tokenizer.end_of_turn_id,)
    return own | frozenset(tokenizer.eos_token_ids) | frozenset(end_of_turn)
