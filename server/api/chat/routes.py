"""POST /v1/chat/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.chat.answer import ChatForm
from server.api.chat.plan import prepare_chat
from server.api.chat.request import ChatCompletionRequest
from server.api.choices.answer import ChoiceAnswer, StreamUsage
from server.api.generation.endpoint import AnsweringEndpoint
from server.api.generation.event_stream import Answer
from server.api.generation.plan import GenerationPlan, Intake
from server.api.generation.wire_values import ResponseHead
from server.api.schemas.answers import ChatCompletionResponse, ErrorResponse
from server.api.schemas.description import answers, event_stream, request_body
from server.api.schemas.streams import ChatCompletionChunk


class ChatEndpoint(AnsweringEndpoint[ChatCompletionRequest]):
    name, id_prefix, body_type = "chat_completions", "chatcmpl-", ChatCompletionRequest

    async def plan(self, intake: Intake, body: ChatCompletionRequest) -> GenerationPlan:
        return await prepare_chat(intake, body)

    def answer(
        self, intake: Intake, plan: GenerationPlan, body: ChatCompletionRequest, head: ResponseHead
    ) -> Answer:
        return ChoiceAnswer(
            plan, ChatForm(intake.loaded.tokenizer, plan, body), head, StreamUsage.of(body.stream_options)
        )


def create_router() -> APIRouter:
    router = APIRouter()
    endpoint = ChatEndpoint()

    @router.post(
        "/v1/chat/completions",
        responses=answers(
            ChatCompletionResponse,
            takes_body=True,
            computes=True,
            events=event_stream(ChatCompletionChunk, ErrorResponse, ends_with="[DONE]"),
        ),
        openapi_extra=request_body("ChatCompletionRequest", computes=True),
        summary="Answer a chat",
    )
    async def create_chat_completion(request: Request) -> Response:
        return await endpoint.handle(request)

    return router
