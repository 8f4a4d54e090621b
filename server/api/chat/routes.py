"""POST /v1/chat/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.chat.answer import ChatAnswer, ChatCompletionChunk, ChatCompletionResponse
from server.api.chat.plan import prepare_chat
from server.api.chat.request import ChatCompletionRequest
from server.api.description import answers, event_stream, request_body
from server.api.generation.endpoint import GenerationEndpoint
from server.errors import ErrorResponse


def create_router() -> APIRouter:
    router = APIRouter()
    endpoint = GenerationEndpoint(
        "chat_completions",
        "chatcmpl-",
        ChatCompletionRequest,
        prepare_chat,
        lambda intake, plan, body, head: ChatAnswer(intake.loaded.tokenizer, plan, body, head),
    )

    @router.post(
        "/v1/chat/completions",
        responses=answers(
            ChatCompletionResponse,
            takes_body=True,
            computes=True,
            events=event_stream(ChatCompletionChunk, ErrorResponse, ends_with="[DONE]"),
        ),
        openapi_extra=request_body(ChatCompletionRequest, computes=True),
        summary="Answer a chat",
    )
    async def create_chat_completion(request: Request) -> Response:
        return await endpoint.handle(request)

    return router
