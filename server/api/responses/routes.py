"""POST /v1/responses."""

from typing import get_args

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.description import answers, event_stream, request_body
from server.api.generation.endpoint import GenerationEndpoint
from server.api.responses.answer import Event, ResponseAnswer, ResponseObject
from server.api.responses.plan import prepare_response
from server.api.responses.request import ResponseRequest


def create_router() -> APIRouter:
    router = APIRouter()
    endpoint = GenerationEndpoint(
        "responses",
        "resp_",
        ResponseRequest,
        prepare_response,
        lambda intake, plan, body, head: ResponseAnswer(
            intake.state, intake.loaded.tokenizer, plan, body, head
        ),
    )

    @router.post(
        "/v1/responses",
        responses=answers(
            ResponseObject, takes_body=True, computes=True, events=event_stream(*get_args(Event), named=True)
        ),
        openapi_extra=request_body(ResponseRequest, computes=True),
        summary="Answer a chat, as typed items",
    )
    async def create_response(request: Request) -> Response:
        return await endpoint.handle(request)

    return router
