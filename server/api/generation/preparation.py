"""From a checked body to a plan, one function per endpoint: constraints compiled, prompts encoded, defaults filled in.

Defaults: the request, then the model's generation_config.json, then OpenAI's. Every refusal is an ApiError that names the field.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from server.admission import Ticket
from server.api.generation.chat_messages import ChatCompletionRequest
from server.api.generation.plan import GenerationPlan
from server.api.generation.planning import (
    DEFAULT_COMPLETION_TOKENS,
    check_choices,
    check_common,
    check_num_sequences,
    check_stream_options,
    hopeless,
    least_num_tokens,
    make_plan,
    truncation,
)
from server.api.generation.prompts import (
    Conversation,
    EncodedPrompt,
    chat_conversation,
    chat_functions,
    encode_chat,
    encode_prompt,
    in_thread,
    prompt_list,
    truncated,
)
from server.api.generation.request import CompletionRequest, GenerationRequest
from server.api.generation.structured_output import choices_constraint, compile_grammar, response_constraint
from server.api.generation.tools import AUTO, compile_constraint, tool_use
from server.api.responses.input import response_conversation, response_functions
from server.api.responses.request import ResponseRequest
from server.errors import invalid_request
from server.loading.load import LoadedEngine
from server.state import ServerState
from server.text.length_bound import PromptTooLongError


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
        prompt_logprobs=max((count for count in (echoed, body.prompt_logprobs) if count is not None), default=None),
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
        message = f"Invalid value for 'best_of': expected at least n = {n}, got {body.best_of}."
        raise invalid_request(message, param="best_of", code="integer_below_min_value")
    if body.best_of > n and body.stream:
        message = "Invalid value for 'best_of': with 'stream' the best choice is not known before its end; leave one of them out."
        raise invalid_request(message, param="best_of", code="invalid_value")
    return body.best_of


async def prepare_chat(
    state: ServerState,
    loaded: LoadedEngine,
    body: ChatCompletionRequest,
    response_id: str,
    ticket: Ticket,
    names: Sequence[str] | None = None,
) -> GenerationPlan:
    """``names``: the request fields that the messages came from, where they are not those of a chat."""
    check_common(loaded, body)
    check_choices(loaded, body, has_logprobs=bool(body.logprobs))
    n = body.n or 1
    check_num_sequences(1, n, "messages", "n")
    if body.top_logprobs is not None and not body.logprobs:
        message = "Invalid value for 'top_logprobs': it needs 'logprobs': true."
        raise invalid_request(message, param="top_logprobs", code="invalid_value")
    use = tool_use(chat_functions(body.tools), body.tool_choice, body.parallel_tool_calls)
    conversation = chat_conversation(body.messages, () if use is None else use.shown, names)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    ticket.admit(n, 0)
    grammar = await compile_constraint(loaded, choices_constraint(body), use, state.metrics)
    encoded = await _encode(
        state, loaded, body, conversation, max_tokens, "messages", body.add_generation_prompt, body.continue_final_message
    )
    plan = make_plan(
        state,
        loaded,
        body,
        response_id,
        [encoded],
        max_tokens=max_tokens,
        default_max_tokens=None,
        n=n,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        logprob_token_ids=body.logprob_token_ids,
        prompt_field="messages",
        grammar=grammar,
        calls=None if use is None else use.call_format,
    )
    return replace(plan, shows_timings=bool(body.return_timings))


async def prepare_response(
    state: ServerState, loaded: LoadedEngine, body: ResponseRequest, response_id: str, ticket: Ticket
) -> GenerationPlan:
    check_common(loaded, body)
    check_stream_options(body.stream_options, body.stream)
    # Every response has a choice, "auto" by default: it may be given without tools too.
    choice = None if body.tool_choice == AUTO else body.tool_choice
    use = tool_use(response_functions(body.tools), choice, body.parallel_tool_calls)
    conversation = response_conversation(body, () if use is None else use.shown)
    ticket.admit(1, 0)
    grammar = await compile_constraint(loaded, response_constraint(body), use, state.metrics)
    encoded = await _encode(state, loaded, body, conversation, body.max_output_tokens, "input")
    return make_plan(
        state,
        loaded,
        body,
        response_id,
        [encoded],
        max_tokens=body.max_output_tokens,
        default_max_tokens=None,
        logprobs=(body.top_logprobs or 0) if body.shows_logprobs else None,
        prompt_field="input",
        grammar=grammar,
        calls=None if use is None else use.call_format,
    )


async def _encode(
    state: ServerState,
    loaded: LoadedEngine,
    body: GenerationRequest,
    conversation: Conversation,
    max_tokens: int | None,
    prompt_field: str,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
) -> EncodedPrompt:
    """The chat as tokens, cut where the request asks for it."""
    limit = truncation(loaded, body, max_tokens, 1)
    try:
        token_ids = await encode_chat(
            state,
            loaded.tokenizer,
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            max_tokens=loaded.engine.limits.max_model_len if limit is None else None,
        )
    except PromptTooLongError as error:
        raise hopeless(loaded, error.num_tokens, 1 if max_tokens is None else max_tokens, prompt_field) from None
    return EncodedPrompt(truncated(token_ids, limit, loaded.tokenizer.bos_token_id), "")
