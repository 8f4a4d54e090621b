"""From a checked body to a plan: constraints compiled, prompts encoded, defaults filled in.

Defaults: the request, then the model's generation_config.json, then OpenAI's. Every refusal is an ApiError
that names the field.
"""

from functools import partial

from server.api.completions.request import CompletionRequest
from server.api.generation.plan import AnswerTerms, GenerationPlan, Intake
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


async def prepare_completion(intake: Intake, body: CompletionRequest) -> GenerationPlan:
    loaded = intake.loaded
    check_common(loaded, body)
    check_choices(loaded, body, has_logprobs=body.logprobs is not None)
    n = body.n or 1
    num_candidates = _num_candidates(body, n)
    prompts = prompt_list(body.prompt)
    check_num_sequences(len(prompts), num_candidates, "prompt", "n" if num_candidates == n else "best_of")
    limit = truncation(loaded, body, body.max_tokens, DEFAULT_COMPLETION_TOKENS)
    least = least_num_tokens(loaded, prompts, limit, body.max_tokens)
    intake.ticket.admit(len(prompts) * num_candidates, least)
    grammar = await compile_grammar(loaded, choices_constraint(body), intake.state.metrics)
    encode = partial(
        encode_prompt,
        loaded.tokenizer,
        limit=limit,
        wants_text=bool(body.echo) or body.logprobs is not None,
        skip_special_tokens=body.skip_special_tokens is not False,
    )
    encoded = await in_thread(intake.state, lambda: [encode(prompt) for prompt in prompts])
    # One run of the prompt serves both; each form shows as many alternatives as it was asked for.
    prompt_logprobs = [body.logprobs if body.echo else None, body.prompt_logprobs]
    terms = AnswerTerms(
        "prompt",
        body.max_tokens,
        DEFAULT_COMPLETION_TOKENS,
        n=num_candidates,
        num_best=n if num_candidates > n else None,
        stop=body.stop or (),
        logprobs=0 if num_candidates > n and body.logprobs is None else body.logprobs,
        prompt_logprobs=max((count for count in prompt_logprobs if count is not None), default=None),
        logprob_token_ids=body.logprob_token_ids,
        shows_timings=bool(body.return_timings),
    )
    return make_plan(intake, body, encoded, terms, grammar=grammar)


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
