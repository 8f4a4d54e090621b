"""From a checked body to a plan: constraints compiled, prompts encoded, defaults filled in.

Defaults: the request, then the model's generation_config.json, then OpenAI's. Every refusal is an ApiError
that names the field.
"""

from server.api.generation.plan import AnswerTerms, GenerationPlan, Intake
from server.api.generation.planning import (
    check_common,
    check_stream_options,
    encode_conversation,
    make_plan,
)
from server.api.generation.structured_output import any_object, grammar_source
from server.api.generation.tools import AUTO, compile_constraint, tool_use
from server.api.responses.input import response_conversation, response_functions
from server.api.responses.request import ResponseRequest
from server.errors import missing_parameter
from server.grammar.source import GrammarSource


async def prepare_response(intake: Intake, body: ResponseRequest) -> GenerationPlan:
    loaded = intake.loaded
    check_common(loaded, body)
    check_stream_options(body.stream_options, body.stream)
    # Every response has a choice, "auto" by default: it may be given without tools too.
    choice = None if body.tool_choice == AUTO else body.tool_choice
    use = tool_use(response_functions(body.tools), choice, body.parallel_tool_calls)
    conversation = response_conversation(body, () if use is None else use.shown)
    terms = AnswerTerms(
        "input",
        body.max_output_tokens,
        stop=body.stop or (),
        logprobs=(body.top_logprobs or 0) if body.shows_logprobs else None,
    )
    intake.ticket.admit(1, 0)
    grammar = await compile_constraint(loaded, response_constraint(body), use, intake.state.metrics)
    encoded = await encode_conversation(intake, body, conversation, terms)
    calls = None if use is None else use.call_format
    return make_plan(intake, body, [encoded], terms, grammar=grammar, calls=calls)


def response_constraint(body: ResponseRequest) -> GrammarSource | None:
    """The one constraint of a response, not compiled yet."""
    given = None if body.text is None else body.text.format
    formats = []
    if given is not None and given.type == "json_object":
        formats = [any_object("text.format")]
    elif given is not None and given.type == "json_schema":
        if given.schema_ is None:
            raise missing_parameter("text.format.schema")
        formats = [GrammarSource("json", given.schema_, "text.format.schema")]
    return grammar_source(body, formats)
