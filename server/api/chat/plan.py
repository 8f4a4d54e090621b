"""From a checked body to a plan: constraints compiled, prompts encoded, defaults filled in.

Defaults: the request, then the model's generation_config.json, then OpenAI's. Every refusal is an ApiError
that names the field.
"""

from collections.abc import Sequence

from server.api.chat.request import ChatCompletionRequest
from server.api.generation.plan import AnswerTerms, GenerationPlan, Intake
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


async def prepare_chat(
    intake: Intake,
    body: ChatCompletionRequest,
    *,
    names: Sequence[str] | None = None,
    stop: Sequence[str] | None = None,
) -> GenerationPlan:
    """``names``: the request fields that the messages came from, and ``stop``: the stop strings, where they
    are not those of a chat."""
    loaded = intake.loaded
    check_common(loaded, body)
    check_choices(loaded, body, has_logprobs=bool(body.logprobs))
    n = body.n or 1
    check_num_sequences(1, n, "messages", "n")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid_value("top_logprobs", "it needs 'logprobs': true")
    use = tool_use(chat_functions(body.tools), body.tool_choice, body.parallel_tool_calls)
    conversation = chat_conversation(body.messages, () if use is None else use.shown, names)
    terms = AnswerTerms(
        "messages",
        body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        n=n,
        stop=(body.stop or ()) if stop is None else stop,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        logprob_token_ids=body.logprob_token_ids,
        shows_timings=bool(body.return_timings),
    )
    intake.ticket.admit(n, 0)
    grammar = await compile_constraint(loaded, choices_constraint(body), use, intake.state.metrics)
    encoded = await encode_conversation(
        intake,
        body,
        conversation,
        terms,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    calls = None if use is None else use.call_format
    return make_plan(intake, body, [encoded], terms, grammar=grammar, calls=calls)
