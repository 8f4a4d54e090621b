"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API. A message is answered as the chat that it is; only
the body and the answer differ."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.context import state_of
from server.api.generation_plan import GenerationPlan
from server.api.generation_routes import AnsweringEndpoint
from server.api.messages_preparation import count_tokens, prepare_messages
from server.api.messages_responses import MessageAnswer
from server.api.messages_schemas import CountTokensRequest, MessagesRequest
from server.api.response_schemas import CountTokensResponse, MessageResponse, MessagesErrorResponse
from server.api.responses import Answer, JsonResponse
from server.api.validation import parse_request, read_json_object, request_body
from server.api.wire_values import ResponseHead
from server.engine.loaded import LoadedEngine
from server.state import ServerState

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": MessagesErrorResponse} for status in (400, 401, 403, 404, 408, 413, 429, 500, 503)
}


def _answer(state: ServerState, loaded: LoadedEngine, plan: GenerationPlan, body: MessagesRequest, head: ResponseHead) -> Answer:
    return MessageAnswer(head)


def create_router() -> APIRouter:
    router = APIRouter()
    messages = AnsweringEndpoint("messages", "msg_", MessagesRequest, prepare_messages, _answer)

    @router.post(
        "/v1/messages",
        responses={200: {"model": MessageResponse}, **_ERRORS},
        openapi_extra=request_body("MessagesRequest"),
        summary="Answer a chat, in Anthropic's form",
    )
    async def create_message(request: Request) -> Response:
        return await messages.handle(request)

    @router.post(
        "/v1/messages/count_tokens",
        responses={200: {"model": CountTokensResponse}, **_ERRORS},
        openapi_extra=request_body("CountTokensRequest"),
        summary="The length of a message's prompt",
    )
    async def count_message_tokens(request: Request) -> Response:
        state = state_of(request)
        loaded = state.require_loaded()
        with state.admission.body() as held:
            value = await read_json_object(request, held, state.settings.read_timeout or None)
            parsed = parse_request(CountTokensRequest, value, strict_params=state.settings.strict_params)
            with state.admission.text_work():
                num_tokens = await count_tokens(state, loaded, parsed.body)
        return JsonResponse({"input_tokens": num_tokens}, headers=parsed.headers())

    return router
