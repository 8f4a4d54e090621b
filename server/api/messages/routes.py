"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API. A message is answered as the
chat that it is; only the body and the answer differ."""

from typing import get_args

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from server.api.description import answers, event_stream, request_body
from server.api.generation.endpoint import GenerationEndpoint
from server.api.generation.validation import parse_request, read_json_object
from server.api.messages.answer import Event, MessageAnswer, MessageResponse
from server.api.messages.plan import count_tokens, prepare_messages
from server.api.messages.request import CountTokensRequest, MessagesRequest
from server.http.context import state_of
from server.http.json_response import JsonResponse


class CountTokensResponse(TypedDict):
    input_tokens: int


def create_router() -> APIRouter:
    router = APIRouter()
    messages = GenerationEndpoint(
        "messages",
        "msg_",
        MessagesRequest,
        prepare_messages,
        lambda intake, plan, body, head: MessageAnswer(head),
    )

    @router.post(
        "/v1/messages",
        responses=answers(
            MessageResponse,
            takes_body=True,
            computes=True,
            is_anthropic=True,
            events=event_stream(*get_args(Event), named=True),
        ),
        openapi_extra=request_body(MessagesRequest, computes=True),
        summary="Answer a chat, in Anthropic's form",
    )
    async def create_message(request: Request) -> Response:
        return await messages.handle(request)

    @router.post(
        "/v1/messages/count_tokens",
        responses=answers(CountTokensResponse, takes_body=True, is_anthropic=True),
        openapi_extra=request_body(CountTokensRequest),
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
        content: CountTokensResponse = {"input_tokens": num_tokens}
        return JsonResponse(content, headers=parsed.headers())

    return router
