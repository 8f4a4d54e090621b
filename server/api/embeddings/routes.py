"""POST /v1/embeddings."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.description import answers, request_body
from server.api.embeddings.answer import EmbeddingsAnswer, EmbeddingsResponse
from server.api.embeddings.plan import prepare_embeddings
from server.api.embeddings.request import EmbeddingRequest
from server.api.generation.endpoint import GenerationEndpoint


def create_router() -> APIRouter:
    router = APIRouter()
    embeddings = GenerationEndpoint(
        "embeddings",
        "embd-",
        EmbeddingRequest,
        prepare_embeddings,
        lambda intake, plan, body, head: EmbeddingsAnswer(intake.state, body, head),
    )

    @router.post(
        "/v1/embeddings",
        responses=answers(EmbeddingsResponse, takes_body=True, computes=True),
        openapi_extra=request_body(EmbeddingRequest, computes=True),
        summary="The meaning of texts as vectors",
    )
    async def create_embeddings(request: Request) -> Response:
        return await embeddings.handle(request)

    return router
