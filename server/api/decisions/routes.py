"""POST /v1/decisions: typed questions about one input. Every question is a prompt of its own with one token
as its answer, so that it is admitted, queued, batched and given up like any other; what they share is
computed once by way of the prefix cache."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from model.interface.sampling_params import SamplingParams
from server.api.decisions.answer_schemas import DecisionResponse
from server.api.decisions.questions import AskedQuestion, Labels, answer, asked, probabilities
from server.api.decisions.request import DecisionRequest, num_characters
from server.api.generation.endpoint import GenerationEndpoint, Headers
from server.api.generation.plan import GenerationPlan, Intake, PromptPlan
from server.api.generation.priority import checked_priority
from server.api.generation.prompts import Conversation, encode_chat
from server.api.generation.run import GenerationRun
from server.api.generation.validation import MAX_BODY_BYTES
from server.api.generation.wire_values import ResponseHead
from server.api.responses.answer import wire_usage
from server.api.responses.input import item_messages
from server.api.schemas.description import answers, request_body
from server.errors import check_model, context_length_exceeded, invalid_value, unsupported_parameter
from server.http.json_response import JsonResponse
from server.loading.load import LoadedEngine
from server.state import ServerState
from server.text.length_bound import PromptTooLongError
from server.text.template.conversation import ChatMessage


async def prepare_decisions(intake: Intake, body: DecisionRequest) -> GenerationPlan:
    state, loaded = intake.state, intake.loaded
    check_model(body.model, loaded.model_names)
    if body.stream:
        raise unsupported_parameter("stream", "Leave it out.")
    priority = checked_priority(state.settings, body.priority)
    if len(body.questions) * num_characters(body.input) > MAX_BODY_BYTES:
        reason = "so many of them about so long an input are too much; ask fewer at once"
        raise invalid_value("questions", reason, code="array_above_max_length")
    questions = _asked(loaded, body)
    messages, names = item_messages(body.input)
    intake.ticket.admit(len(questions), 0)
    prompts = []
    for index, question in enumerate(questions):
        # The question ends the last turn of the input, or is the turn behind it.
        turns = [*messages, ChatMessage("user", question.text)]
        token_ids = await _encode(
            state, loaded, Conversation(turns, [*names, names[-1]]), f"questions[{index}]"
        )
        prompts.append(PromptPlan(token_ids, _sampling(question), ""))
    return GenerationPlan(intake.response_id, tuple(prompts), n=1, stop=(), priority=priority)


def _asked(loaded: LoadedEngine, body: DecisionRequest) -> list[AskedQuestion]:
    labels = Labels(loaded.tokenizer)
    return [asked(question, labels, f"questions[{index}]") for index, question in enumerate(body.questions)]


def _sampling(question: AskedQuestion) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=question.labels)


async def _encode(
    state: ServerState, loaded: LoadedEngine, conversation: Conversation, param: str
) -> list[int]:
    limit = loaded.engine.limits.max_model_len
    too_long = partial(context_length_exceeded, limit, num_completion_tokens=1, param=param)
    try:
        token_ids = await encode_chat(
            state,
            loaded.tokenizer,
            conversation,
            add_generation_prompt=True,
            continue_final_message=None,
            max_tokens=limit,
        )
    except PromptTooLongError as error:
        raise too_long(error.num_tokens, is_bound=True) from None
    if len(token_ids) + 1 > limit:
        raise too_long(len(token_ids))
    return token_ids


class DecisionsEndpoint(GenerationEndpoint[DecisionRequest]):
    """Streams are refused before anything is computed."""

    name, id_prefix, body_type = "decisions", "dec_", DecisionRequest

    async def plan(self, intake: Intake, body: DecisionRequest) -> GenerationPlan:
        return await prepare_decisions(intake, body)

    async def respond(
        self, intake: Intake, run: GenerationRun, body: DecisionRequest, head: ResponseHead, headers: Headers
    ) -> Response:
        found: dict[int, list[float]] = {}
        while (event := await run.next_event()) is not None:
            for token in event.logprobs:
                found[event.index] = probabilities([logprob for _, logprob in token.top])
        given = [answer(question, found[index]) for index, question in enumerate(body.questions)]
        return JsonResponse(
            {"model": head.model, "answers": given, "usage": wire_usage(run.usage)}, headers=headers
        )


def create_router() -> APIRouter:
    router = APIRouter()
    decisions = DecisionsEndpoint()

    @router.post(
        "/v1/decisions",
        responses=answers(DecisionResponse, takes_body=True, computes=True),
        openapi_extra=request_body("DecisionRequest", computes=True),
        summary="Typed questions about some input",
    )
    async def create_decisions(request: Request) -> Response:
        return await decisions.handle(request)

    return router
