"""The answer to a request that failed, in the form of the API that was asked: Anthropic's from /v1/messages
on, OpenAI's elsewhere."""

from typing import Literal

from starlette.responses import Response
from starlette.types import Scope
from typing_extensions import TypedDict

from server.errors import MAX_MESSAGE_CHARACTERS, ApiError, shorten
from server.http.context import REQUEST_ID_KEY
from server.http.json_response import JsonResponse, error_response

_MESSAGES_PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class MessagesErrorDetail(TypedDict):
    type: str
    message: str


class MessagesErrorResponse(TypedDict):
    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class MessageErrorEvent(TypedDict):
    """A fault after the first token."""

    type: Literal["error"]
    error: MessagesErrorDetail


def is_messages_path(path: str) -> bool:
    """Whether a client of Anthropic's API speaks."""
    return path == _MESSAGES_PATH or path.startswith(_MESSAGES_PATH + "/")


def messages_error(error: ApiError) -> MessageErrorEvent:
    kind = _TYPES.get(error.status, "invalid_request_error")
    message = shorten(error.message, MAX_MESSAGE_CHARACTERS)
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_answer(scope: Scope, error: ApiError) -> Response:
    if not is_messages_path(scope["path"]):
        return error_response(error)
    body: MessagesErrorResponse = {**messages_error(error), "request_id": scope[REQUEST_ID_KEY].value}
    return JsonResponse(body, error.status, dict(error.headers or {}))
