"""The answer to a request that failed, in the form of the API that was asked: Anthropic's from /v1/messages
on, OpenAI's elsewhere."""

from typing import Any

from starlette.responses import Response
from starlette.types import Scope

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


def is_messages_path(path: str) -> bool:
    """Whether a client of Anthropic's API speaks."""
    return path == _MESSAGES_PATH or path.startswith(_MESSAGES_PATH + "/")


def messages_error(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "invalid_request_error")
    body = {
        "type": "error",
        "error": {"type": kind, "message": shorten(error.message, MAX_MESSAGE_CHARACTERS)},
    }
    return body if request_id is None else {**body, "request_id": request_id}


def error_answer(scope: Scope, error: ApiError) -> Response:
    if not is_messages_path(scope["path"]):
        return error_response(error)
    return JsonResponse(
        messages_error(error, scope[REQUEST_ID_KEY].value), error.status, dict(error.headers or {})
    )
