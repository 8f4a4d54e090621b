"""From encoded prompts to a plan, the same for all endpoints: ids and lengths are checked against the model.
Every refusal is an ApiError that names the field."""

import secrets
from collections.abc import Sequence

from model.interface.grammar_state import Grammar
from server.api.generation.plan import AnswerTerms, GenerationPlan, Intake, PromptPlan
from server.api.generation.priority import checked_priority
from server.api.generation.prompts import (
    Conversation,
    EncodedPrompt,
    check_token_ids,
    encode_chat,
    truncated,
    unknown_token,
)
from server.api.generation.request import ChoicesRequest, GenerationRequest
from server.api.generation.sampling import sampling_params
from server.api.generation.wire_values import WireModel
from server.errors import ApiError, check_model, context_length_exceeded, invalid_request, invalid_value
from server.loading.load import LoadedEngine
from server.text.length_bound import PromptTooLongError
from server.text.tool_calls.call_parser import CallFormat

# Prompts x choices of one request; each is a request of its own in the engine.
MAX_SEQUENCES = 1024
DEFAULT_COMPLETION_TOKENS = 16


def check_common(loaded: LoadedEngine, body: GenerationRequest) -> None:
    check_model(body.model, loaded.model_names)
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


def check_choices(loaded: LoadedEngine, body: ChoicesRequest, *, has_logprobs: bool) -> None:
    """What completions and chats check besides."""
    check_stream_options(body.stream_options, body.stream)
    if body.prompt_logprobs is not None and body.stream:
        raise invalid_value("prompt_logprobs", "they are not sent with 'stream'; leave one of them out")
    check_token_ids(loaded.tokenizer, body.logprob_token_ids or (), "logprob_token_ids")
    if body.logprob_token_ids and not has_logprobs:
        raise invalid_value("logprob_token_ids", "it needs 'logprobs'")


def check_stream_options(options: WireModel | None, stream: bool | None) -> None:
    if options is not None and not stream:
        message = "The parameter 'stream_options' is allowed only when 'stream' is true."
        raise invalid_request(message, param="stream_options", code="invalid_value")


def check_num_sequences(num_prompts: int, n: int, param: str, count_param: str) -> None:
    if num_prompts * n > MAX_SEQUENCES:
        reason = f"{num_prompts} prompts x {n} choices are more than the limit of {MAX_SEQUENCES}"
        blamed = count_param if n > 1 else param
        raise invalid_value(count_param, reason, code="integer_above_max_value", param=blamed)


def least_num_tokens(
    loaded: LoadedEngine, prompts: Sequence[str | list[int]], limit: int | None, max_tokens: int | None
) -> int:
    """A lower bound of the tokens of all prompts, before anything is encoded. ``limit``: see ``truncated``.
    Raises ApiError when a text cannot fit."""
    total = 0
    for prompt in prompts:
        least = loaded.tokenizer.least_num_tokens(prompt) if isinstance(prompt, str) else len(prompt)
        if limit is not None:
            least = min(least, limit)
        elif isinstance(prompt, str) and least > loaded.engine.limits.max_model_len:
            raise hopeless(
                loaded, least, DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens, "prompt"
            )
        total += least
    return total


def hopeless(loaded: LoadedEngine, least: int, max_tokens: int, param: str) -> ApiError:
    return context_length_exceeded(
        loaded.engine.limits.max_model_len, least, max_tokens, param, is_bound=True
    )


def truncation(
    loaded: LoadedEngine, body: GenerationRequest, max_tokens: int | None, default_max_tokens: int
) -> int | None:
    """The most tokens a prompt keeps; None when nothing is to be cut. -1 leaves room for max_tokens."""
    asked = body.truncate_prompt_tokens
    if asked != -1:
        return asked
    wanted = default_max_tokens if max_tokens is None else max_tokens
    return max(1, loaded.engine.limits.max_model_len - wanted)


def make_plan(
    intake: Intake,
    body: GenerationRequest,
    prompts: Sequence[EncodedPrompt],
    terms: AnswerTerms,
    *,
    grammar: Grammar | None = None,
    calls: CallFormat | None = None,
) -> GenerationPlan:
    """Raises ApiError for a prompt that leaves no room for an answer."""
    state = intake.state
    min_tokens = body.min_tokens or 0
    if terms.max_tokens is not None and min_tokens > terms.max_tokens:
        reason = f"expected at most max_tokens = {terms.max_tokens}, got {min_tokens}"
        raise invalid_value("min_tokens", reason, code="integer_above_max_value")
    # One draw for the whole request: choices differ by their number, not by their seed.
    seed = secrets.randbits(63) if body.seed is None else body.seed
    plans = []
    for prompt in prompts:
        room = intake.max_model_len - len(prompt.token_ids)
        limit = _fitting_max_tokens(intake, terms, room)
        sampling = sampling_params(
            intake, body, terms, max_tokens=limit, min_tokens=min(min_tokens, limit), seed=seed
        )
        plans.append(PromptPlan(prompt.token_ids, sampling, prompt.text))
    return GenerationPlan(
        intake.response_id,
        tuple(plans),
        terms.n,
        tuple(terms.stop),
        body.cache_salt,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        num_best=terms.num_best,
        grammar=grammar,
        calls=calls,
        priority=checked_priority(state.settings, body.priority),
        shows_timings=terms.shows_timings,
    )


def _fitting_max_tokens(intake: Intake, terms: AnswerTerms, room: int) -> int:
    """max_tokens, lowered to the room that the prompt leaves. A prompt is never cut: one that leaves no room
    is an error."""
    asked = terms.max_tokens
    wanted = terms.default_max_tokens if asked is None else asked
    needed = 0 if wanted == 0 else 1
    if room < needed or (intake.state.settings.strict_context and asked is not None and asked > room):
        limit = intake.max_model_len
        raise context_length_exceeded(
            limit, limit - room, needed if wanted is None else wanted, terms.prompt_field
        )
    return room if wanted is None else min(wanted, room)


async def encode_conversation(
    intake: Intake,
    body: GenerationRequest,
    conversation: Conversation,
    terms: AnswerTerms,
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
) -> EncodedPrompt:
    """The chat as tokens, cut where the request asks for it."""
    loaded = intake.loaded
    limit = truncation(loaded, body, terms.max_tokens, 1)
    try:
        token_ids = await encode_chat(
            intake.state,
            loaded.tokenizer,
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            max_tokens=intake.max_model_len if limit is None else None,
        )
    except PromptTooLongError as error:
        max_tokens = 1 if terms.max_tokens is None else terms.max_tokens
        raise hopeless(loaded, error.num_tokens, max_tokens, terms.prompt_field) from None
    return EncodedPrompt(truncated(token_ids, limit, loaded.tokenizer.bos_token_id), "")
