"""POST /v1/decisions: typed questions about one input."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.decisions.answer import DecisionAnswer, DecisionResponse
from server.api.decisions.plan import prepare_decisions
from server.api.decisions.request import DecisionRequest
from server.api.description import answers, request_body
from server.api.generation.endpoint import GenerationEndpoint


def create_router() -> APIRouter:
    router = APIRouter()
    decisions = GenerationEndpoint(
        "decisions",
        "dec_",
        DecisionRequest,
        prepare_decisions,
        lambda intake, plan, body, head: DecisionAnswer(body, head),
    )

    @router.post(
        "/v1/decisions",
        responses=answers(DecisionResponse, takes_body=True, computes=True),
        openapi_extra=request_body(DecisionRequest, computes=True),
        summary="Typed questions about some input",
    )
    async def create_decisions(request: Request) -> Response:
        return await decisions.handle(request)

    return router
