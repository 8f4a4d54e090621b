"""From a checked body to a plan: constraints compiled, prompts encoded, defaults filled in.

Defaults: the request, then the model's generation_config.json, then OpenAI's. Every refusal is an ApiError
that names the field.
"""

from dataclasses import replace
from functools import partial

from server.admission import Ticket
from server.api.completions.request import CompletionRequest
from server.api.generation.plan import GenerationPlan
from server.api.generation.planning import (
    DEFAULT_COMPLETION_TOKENS,
    check_choices,
    check_common,
    check_num_sequences,
    least_num_tokens,
    make_plan,
    truncation,
)
from server.api.generation.prompts import (
    encode_prompt,
    in_thread,
    prompt_list,
)
from server.api.generation.structured_output import choices_constraint, compile_grammar
from server.errors import invalid_value
from server.loading.load import LoadedEngine
from server.state import ServerState


async def prepare_completion(
    state: ServerState, loaded: LoadedEngine, body: CompletionRequest, response_id: str, ticket: Ticket
) -> GenerationPlan:
    check_common(loaded, body)
    check_choices(loaded, body, has_logprobs=body.logprobs is not None)
    n = body.n or 1
    num_candidates = _num_candidates(body, n)
    prompts = prompt_list(body.prompt)
    check_num_sequences(len(prompts), num_candidates, "prompt", "n" if num_candidates == n else "best_of")
    limit = truncation(loaded, body, body.max_tokens, DEFAULT_COMPLETION_TOKENS)
    ticket.admit(len(prompts) * num_candidates, least_num_tokens(loaded, prompts, limit, body.max_tokens))
    grammar = await compile_grammar(loaded, choices_constraint(body), state.metrics)
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
    plan = make_plan(
        state,
        loaded,
        body,
        response_id,
        encoded,
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        logprobs=logprobs,
        # One run of the prompt serves both; each form shows as many alternatives as it was asked for.
        prompt_logprobs=max(
            (count for count in (echoed, body.prompt_logprobs) if count is not None), default=None
        ),
        logprob_token_ids=body.logprob_token_ids,
        prompt_field="prompt",
        n=num_candidates,
        grammar=grammar,
    )
    return replace(plan, num_best=n if num_candidates > n else None, shows_timings=bool(body.return_timings))


def _num_candidates(body: CompletionRequest, n: int) -> int:
    """How many choices per prompt are drawn: best_of, of which the best n are returned."""
    if body.best_of is None:
        return n
    if body.best_of < n:
        reason = f"expected at least n = {n}, got {body.best_of}"
        raise invalid_value("best_of", reason, code="integer_below_min_value")
    if body.best_of > n and body.stream:
        reason = "with 'stream' the best choice is not known before its end; leave one of them out"
        raise invalid_value("best_of", reason)
    return body.best_of
