"""POST /v1/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.completions.answer import CompletionAnswer, CompletionChunk, CompletionResponse
from server.api.completions.plan import prepare_completion
from server.api.completions.request import CompletionRequest
from server.api.description import answers, event_stream, request_body
from server.api.generation.endpoint import GenerationEndpoint
from server.errors import ErrorResponse


def create_router() -> APIRouter:
    router = APIRouter()
    endpoint = GenerationEndpoint(
        "completions",
        "cmpl-",
        CompletionRequest,
        prepare_completion,
        lambda intake, plan, body, head: CompletionAnswer(intake.loaded.tokenizer, plan, body, head),
    )

    @router.post(
        "/v1/completions",
        responses=answers(
            CompletionResponse,
            takes_body=True,
            computes=True,
            events=event_stream(CompletionChunk, ErrorResponse, ends_with="[DONE]"),
        ),
        openapi_extra=request_body(CompletionRequest, computes=True),
        summary="Continue a prompt",
    )
    async def create_completion(request: Request) -> Response:
        return await endpoint.handle(request)

    return router
