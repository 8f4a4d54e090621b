"""Every error a client can see, in OpenAI's shape, ``{"error": {"message", "type", "param", "code"}}``; code
is a string or null.

The constructors below are the whole list: status, type and code stand here once. Messages never hold a
traceback, a path of the server, or more than a bounded piece of what the client sent.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from typing_extensions import TypedDict

MAX_MESSAGE_CHARACTERS = 1000
MAX_PARAM_CHARACTERS = 200
RETRY_AFTER_SECONDS = 5

# Why a request was refused, as counted in gemserve_request_rejections_total.
Rejection = Literal[
    "invalid",
    "context_length",
    "model_not_found",
    "unauthorized",
    "queue_full",
    "token_budget",
    "draining",
    "not_ready",
    "too_large",
]
REJECTIONS: tuple[Rejection, ...] = Rejection.__args__  # type: ignore[attr-defined]


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(TypedDict):
    error: ErrorDetail


def shorten(text: str, limit: int) -> str:
    """The text, cut to ``limit`` characters; lone surrogates are escaped, so that it can always be sent."""
    text = text[: limit + 1].encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= limit else text[: limit - 1] + "…"


@dataclass(eq=False)
class ApiError(Exception):
    """An answer other than 200. ``rejection`` is None when the request was taken and failed later; then
    ``outcome`` counts it."""

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] | None = None
    rejection: Rejection | None = "invalid"
    outcome: Literal["error", "timeout"] = "error"

    def __str__(self) -> str:
        return self.message

    def body(self) -> ErrorResponse:
        param = None if self.param is None else shorten(self.param, MAX_PARAM_CHARACTERS)
        message = shorten(self.message, MAX_MESSAGE_CHARACTERS)
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}


class ClientDisconnectedError(Exception):
    """The client left; nobody reads an answer."""


def invalid_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def missing_parameter(param: str, alternative: str = "") -> ApiError:
    """``alternative``: what may stand in its place, added to the sentence."""
    message = f"Missing required parameter: '{param}'{alternative}."
    return ApiError(400, message, param=param, code="missing_required_parameter")


def invalid_value(
    name: str, reason: str, *, code: str = "invalid_value", param: str | None = None
) -> ApiError:
    """``reason``: the rest of the sentence, without its full stop. ``param``: the field that the error is
    about, where it is not the one that the sentence names."""
    return ApiError(400, f"Invalid value for '{name}': {reason}.", param=param or name, code=code)


def unsupported_parameter(name: str, detail: str = "") -> ApiError:
    message = (
        f"The parameter '{shorten(name, 100)}' is not supported by this "
        f"server.{' ' + detail if detail else ''}"
    )
    return ApiError(400, message, param=name, code="unsupported_parameter")


def context_length_exceeded(
    limit: int, num_prompt_tokens: int, num_completion_tokens: int, param: str, *, is_bound: bool = False
) -> ApiError:
    """The wording is load-bearing: clients recognise the case by it. ``is_bound``: the prompt was not
    counted, it is at least that long."""
    message = (
        f"This model's maximum context length is {limit} tokens. "
        f"However, you requested {'at least ' if is_bound else ''}"
        f"{num_prompt_tokens + num_completion_tokens} tokens ({num_prompt_tokens} in the messages, "
        f"{num_completion_tokens} in the completion). Please reduce the length of the messages or completion."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded", rejection="context_length")


def check_model(name: str | None, served_names: Collection[str]) -> None:
    """Raises ApiError for a model that is not served. None: a request that names none takes what there is."""
    if name is None or name in served_names:
        return
    message = (
        f"The model `{shorten(name, 200)}` does not exist. GET /v1/models lists the models of this server."
    )
    raise ApiError(404, message, param="model", code="model_not_found", rejection="model_not_found")


def unknown_url(method: str, path: str) -> ApiError:
    message = f"Invalid URL ({shorten(method, 20)} {shorten(path, 200)})"
    return ApiError(404, message, code="unknown_url")


def method_not_supported(method: str, path: str, headers: Mapping[str, str] | None) -> ApiError:
    message = f"Method {shorten(method, 20)} is not supported by {shorten(path, 200)}."
    return ApiError(405, message, code="method_not_supported", headers=headers)


def unauthorized(presented: bool) -> ApiError:
    message = (
        "Incorrect API key provided."
        if presented
        else "You didn't provide an API key: send it as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'."
    )
    code = "invalid_api_key" if presented else None
    return ApiError(401, message, code=code, headers={"www-authenticate": "Bearer"}, rejection="unauthorized")


def request_too_large(limit: int) -> ApiError:
    message = f"The request body is larger than the limit of {limit} bytes."
    return ApiError(
        413, message, code="request_too_large", headers={"connection": "close"}, rejection="too_large"
    )


def body_too_slow(seconds: float) -> ApiError:
    message = f"The request body did not arrive within {seconds:g} seconds."
    return ApiError(
        408, message, type="timeout_error", code="request_timeout", headers={"connection": "close"}
    )


def host_not_allowed(host: str) -> ApiError:
    message = (
        f"The Host {shorten(host, 100)!r} is not one of this server, which listens on a loopback address. "
        f"Start it with --allowed-hosts to accept the name."
    )
    return ApiError(403, message, code="host_not_allowed", rejection="unauthorized")


def server_overloaded(status: int, message: str, retry_after: int, rejection: Rejection) -> ApiError:
    headers = {"retry-after": str(retry_after)}
    return ApiError(
        status,
        message,
        type="server_overloaded",
        code="server_overloaded",
        headers=headers,
        rejection=rejection,
    )


def request_timeout() -> ApiError:
    """Clients must not repeat it by themselves: the time that they gave is over."""
    message = "The request was not finished within the time that it allowed."
    headers = {"x-should-retry": "false"}
    return ApiError(
        408,
        message,
        type="timeout_error",
        code="request_timeout",
        headers=headers,
        rejection=None,
        outcome="timeout",
    )


def too_many_connections() -> ApiError:
    return _unavailable(
        "The server has too many open connections. Try again in a few seconds.",
        "too_many_connections",
        "queue_full",
    )


def compiler_busy() -> ApiError:
    return _unavailable(
        "Too many constraints and schemas wait to be compiled. Try again in a few seconds.",
        "compiler_busy",
        "queue_full",
    )


def model_not_ready(message: str) -> ApiError:
    return _unavailable(message, "model_not_ready", "not_ready")


def shutting_down() -> ApiError:
    return _unavailable("The server is shutting down and takes no new requests.", "shutting_down", "draining")


def _unavailable(message: str, code: str, rejection: Rejection) -> ApiError:
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)}
    return ApiError(503, message, type="service_unavailable", code=code, headers=headers, rejection=rejection)


def internal_error(message: str = "The server had an error while processing your request.") -> ApiError:
    """Clients must not repeat it by themselves: a fault after minutes of generation would be tried again and
    again."""
    headers = {"x-should-retry": "false"}
    return ApiError(500, message, type="server_error", code="internal_error", headers=headers, rejection=None)
