"""POST /v1/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.choices.answer import ChoiceAnswer, StreamUsage
from server.api.completions.answer import CompletionForm
from server.api.completions.plan import prepare_completion
from server.api.completions.request import CompletionRequest
from server.api.generation.endpoint import AnsweringEndpoint
from server.api.generation.event_stream import Answer
from server.api.generation.plan import GenerationPlan, Intake
from server.api.generation.wire_values import ResponseHead
from server.api.schemas.answers import CompletionResponse, ErrorResponse
from server.api.schemas.description import answers, event_stream, request_body
from server.api.schemas.streams import CompletionChunk


class CompletionsEndpoint(AnsweringEndpoint[CompletionRequest]):
    name, id_prefix, body_type = "completions", "cmpl-", CompletionRequest

    async def plan(self, intake: Intake, body: CompletionRequest) -> GenerationPlan:
        return await prepare_completion(intake, body)

    def answer(
        self, intake: Intake, plan: GenerationPlan, body: CompletionRequest, head: ResponseHead
    ) -> Answer:
        return ChoiceAnswer(
            plan,
            CompletionForm(intake.loaded.tokenizer, plan, body),
            head,
            StreamUsage.of(body.stream_options),
        )


def create_router() -> APIRouter:
    router = APIRouter()
    endpoint = CompletionsEndpoint()

    @router.post(
        "/v1/completions",
        responses=answers(
            CompletionResponse,
            takes_body=True,
            computes=True,
            events=event_stream(CompletionChunk, ErrorResponse, ends_with="[DONE]"),
        ),
        openapi_extra=request_body("CompletionRequest", computes=True),
        summary="Continue a prompt",
    )
    async def create_completion(request: Request) -> Response:
        return await endpoint.handle(request)

    return router
