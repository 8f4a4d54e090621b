"""How the tokens of a request are drawn: its own parameters, else the model's generation_config.json, else
OpenAI's defaults."""

from model.interface.sampling_params import SamplingParams
from server.api.generation.plan import AnswerTerms, Intake
from server.api.generation.request import GenerationRequest
from server.errors import invalid_value
from server.state import ServerState
from server.text.tokenizer import Tokenizer


def effective_temperature(state: ServerState, body: GenerationRequest) -> float:
    return float(
        state.effective_default("temperature", 1.0) if body.temperature is None else body.temperature
    )


def effective_top_p(state: ServerState, body: GenerationRequest) -> float:
    return float(state.effective_default("top_p", 1.0) if body.top_p is None else body.top_p)


def sampling_params(
    intake: Intake,
    body: GenerationRequest,
    terms: AnswerTerms,
    *,
    max_tokens: int,
    min_tokens: int,
    seed: int,
) -> SamplingParams:
    """``max_tokens`` and ``min_tokens``: those that the context has room for."""
    state = intake.state
    top_p = effective_top_p(state, body)
    top_k = max(0, state.effective_default("top_k", 0) if body.top_k is None else body.top_k)
    if top_p == 0.0:  # the smallest set that reaches a probability of 0: the likeliest token
        top_p, top_k = 1.0, 1
    tokenizer = intake.loaded.tokenizer
    biases = [(int(key), bias) for key, bias in (body.logit_bias or {}).items()]
    stop_ids = stop_token_ids(tokenizer, body)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=effective_temperature(state, body),
        top_p=top_p,
        top_k=min(int(top_k), tokenizer.num_known_tokens),
        min_p=body.min_p or 0.0,
        seed=seed,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        # An id that the head has and the tokenizer has not is never drawn: nothing to push or to wait for.
        logit_bias=tuple(
            sorted((token_id, bias) for token_id, bias in biases if token_id < tokenizer.num_known_tokens)
        ),
        allowed_token_ids=_allowed_token_ids(tokenizer, body, stop_ids, min_tokens),
        stop_token_ids=stop_ids,
        min_tokens=min_tokens,
        logprobs=terms.logprobs,
        logprob_token_ids=tuple(dict.fromkeys(terms.logprob_token_ids)) if terms.logprob_token_ids else None,
        prompt_logprobs=terms.prompt_logprobs,
    )


def _allowed_token_ids(
    tokenizer: Tokenizer, body: GenerationRequest, stop_ids: frozenset[int], min_tokens: int
) -> tuple[int, ...] | None:
    """Refuses what leaves no token to draw: ids without a token, or end tokens alone while min_tokens keeps
    them out."""
    if body.allowed_token_ids is None:
        return None
    allowed = {token_id for token_id in body.allowed_token_ids if token_id < tokenizer.num_known_tokens}
    if not (allowed - stop_ids if min_tokens > 0 else allowed):
        reason = "no token is left to draw (ids without a token"
        reason += ", end tokens before 'min_tokens')" if min_tokens > 0 else ")"
        raise invalid_value("allowed_token_ids", reason)
    return tuple(sorted(allowed))


def stop_token_ids(tokenizer: Tokenizer, body: GenerationRequest) -> frozenset[int]:
    """The model's end tokens, the end of a turn and the request's own; with ignore_eos the last alone. On all
    endpoints."""
    own = frozenset(
        token_id for token_id in body.stop_token_ids or () if token_id < tokenizer.num_known_tokens
    )
    if body.ignore_eos:
        return own
    end_of_turn = () if tokenizer.end_of_turn_id is None else (tokenizer.end_of_turn_id,)
    return own | frozenset(tokenizer.eos_token_ids) | frozenset(end_of_turn)
