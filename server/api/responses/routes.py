"""POST /v1/responses."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.generation.endpoint import AnsweringEndpoint
from server.api.generation.event_stream import Answer
from server.api.generation.plan import GenerationPlan, Intake
from server.api.generation.wire_values import ResponseHead
from server.api.responses.answer import ResponseAnswer
from server.api.responses.plan import prepare_response
from server.api.responses.request import ResponseRequest
from server.api.schemas.answers import ResponseObject
from server.api.schemas.description import answers, event_stream, request_body
from server.api.schemas.streams import RESPONSE_EVENTS


class ResponsesEndpoint(AnsweringEndpoint[ResponseRequest]):
    name, id_prefix, body_type = "responses", "resp_", ResponseRequest

    async def plan(self, intake: Intake, body: ResponseRequest) -> GenerationPlan:
        return await prepare_response(intake, body)

    def answer(
        self, intake: Intake, plan: GenerationPlan, body: ResponseRequest, head: ResponseHead
    ) -> Answer:
        return ResponseAnswer(intake.state, intake.loaded.tokenizer, plan, body, head)


def create_router() -> APIRouter:
    router = APIRouter()
    endpoint = ResponsesEndpoint()

    @router.post(
        "/v1/responses",
        responses=answers(
            ResponseObject, takes_body=True, computes=True, events=event_stream(*RESPONSE_EVENTS, named=True)
        ),
        openapi_extra=request_body("ResponseRequest", computes=True),
        summary="Answer a chat, as typed items",
    )
    async def create_response(request: Request) -> Response:
        return await endpoint.handle(request)

    return router
