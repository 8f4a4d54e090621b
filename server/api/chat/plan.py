"""From a checked body to a plan: constraints compiled, prompts encoded, defaults filled in.

Defaults: the request, then the model's generation_config.json, then OpenAI's. Every refusal is an ApiError
that names the field.
"""

from collections.abc import Sequence
from dataclasses import replace

from server.admission import Ticket
from server.api.chat.request import ChatCompletionRequest
from server.api.generation.plan import GenerationPlan
from server.api.generation.planning import (
    check_choices,
    check_common,
    check_num_sequences,
    encode_conversation,
    make_plan,
)
from server.api.generation.prompts import (
    chat_conversation,
    chat_functions,
)
from server.api.generation.structured_output import choices_constraint
from server.api.generation.tools import compile_constraint, tool_use
from server.errors import invalid_value
from server.loading.load import LoadedEngine
from server.state import ServerState


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
        raise invalid_value("top_logprobs", "it needs 'logprobs': true")
    use = tool_use(chat_functions(body.tools), body.tool_choice, body.parallel_tool_calls)
    conversation = chat_conversation(body.messages, () if use is None else use.shown, names)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    ticket.admit(n, 0)
    grammar = await compile_constraint(loaded, choices_constraint(body), use, state.metrics)
    encoded = await encode_conversation(
        state,
        loaded,
        body,
        conversation,
        max_tokens,
        "messages",
        body.add_generation_prompt,
        body.continue_final_message,
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
