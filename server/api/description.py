"""What /openapi.json says of a route's answers: every status that it can give, with its headers and the
models of its bodies and of the events of its streams. Bodies of requests are read by hand, so their schemas
are named by hand here too."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from server.api.generation.validation import IGNORED_HEADER
from server.errors import ErrorResponse
from server.http.error_answers import MessagesErrorResponse

# Also given before a request reaches its route: to a head that is no HTTP, comes too slowly or is too large,
# and to a connection too many. Such an answer has no request id, and OpenAI's form of an error whoever asks.
_PROTOCOL = frozenset({400, 408, 431, 503})
# What any route may answer; what those that take a body may answer besides.
_ALWAYS = (400, 401, 403, 408, 431, 500, 503)
_WITH_BODY = (404, 413, 429)

_DESCRIPTIONS = {
    200: "Done",
    400: "The request is not valid; param names the field",
    401: "No key, or a wrong one",
    403: "The Host is not one of this server",
    404: "No such model",
    408: "The request, or its answer, was not there in time",
    413: "The body is too large",
    429: "Too much is waiting; try again later",
    431: "The head of the request is too large",
    500: "A fault of the server",
    503: "Not ready, or too busy; try again later",
}


def _header(kind: str, description: str, *, required: bool = False) -> dict[str, Any]:
    return {"description": description, "required": required, "schema": {"type": kind}}


_RETRY_AFTER = {"retry-after": _header("integer", "Seconds to wait", required=True)}
_SHOULD_RETRY = {
    "x-should-retry": _header("string", "false: clients must not repeat the request by themselves")
}
_HEADERS: Mapping[int, dict[str, Any]] = {
    401: {"www-authenticate": _header("string", "Bearer", required=True)},
    408: _SHOULD_RETRY,
    429: _RETRY_AFTER,
    500: _SHOULD_RETRY,
    503: _RETRY_AFTER,
}
_IGNORED = {IGNORED_HEADER: _header("string", "Fields of the request that had no effect")}
_TIMINGS = {
    "server-timing": _header(
        "string", "Milliseconds in the queue, of prefill and of decoding; of an answer in one piece"
    ),
    "openai-processing-ms": _header("integer", "The whole time in the server; of an answer in one piece"),
}
_TIMEOUT_PARAMETER = {
    "name": "X-Request-Timeout",
    "in": "header",
    "description": "Seconds within which the whole answer must be there.",
    "schema": {"type": "number", "minimum": 0.001, "maximum": 86400},
}


def answers(
    ok: Any,
    *,
    takes_body: bool = False,
    computes: bool = False,
    knows_models: bool = False,
    is_open: bool = False,
    is_anthropic: bool = False,
    unavailable: Any = None,
    events: Mapping[str, Any] | None = None,
) -> dict[int | str, dict[str, Any]]:
    """For a route's ``responses``. ``ok``: the TypedDict of a 200, None where it is plain text.
    ``unavailable``: what else a 503 may hold. ``events``: the schema of the events of a stream, see
    ``event_stream``. ``is_open``: no key is needed."""
    statuses = {*_ALWAYS, *(_WITH_BODY if takes_body else ()), *([404] if knows_models else ())} - (
        {401} if is_open else set()
    )
    found: dict[int | str, dict[str, Any]] = {200: _answer(200, ok, is_anthropic)}
    found[200]["headers"] |= {**(_IGNORED if takes_body else {}), **(_TIMINGS if computes else {})}
    if ok is None:
        found[200]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    if events is not None:
        found[200]["content"] = {"text/event-stream": {"itemSchema": events}}
    for status in sorted(statuses):
        model: Any = MessagesErrorResponse if is_anthropic else ErrorResponse
        if is_anthropic and status in _PROTOCOL:
            model = ErrorResponse if status == 431 else MessagesErrorResponse | ErrorResponse
        if status == 503 and unavailable is not None:
            model = unavailable | ErrorResponse
        found[status] = _answer(status, model, is_anthropic)
    return found


def _answer(status: int, model: Any, is_anthropic: bool) -> dict[str, Any]:
    has_id = status not in _PROTOCOL
    headers = {"x-request-id": _header("string", "The id of the request", required=has_id)}
    if is_anthropic:
        headers["request-id"] = headers["x-request-id"]
    answer = {"description": _DESCRIPTIONS[status], "headers": {**headers, **_HEADERS.get(status, {})}}
    return answer if model is None else {**answer, "model": model}


def event_stream(*models: Any, ends_with: str | None = None, named: bool = False) -> dict[str, Any]:
    """One event of a stream, as OpenAPI 3.2 and FastAPI describe it. ``models``: of its data, one of which it
    is; they are TypedDicts. ``ends_with``: data of the last event, which is no JSON. ``named``: events have a
    name, the type in their data."""
    content: dict[str, Any] = {"anyOf": [reference(model.__name__) for model in models]}
    data: dict[str, Any] = {"contentMediaType": "application/json", "contentSchema": content}
    if ends_with is not None:
        data = {"anyOf": [{"const": ends_with}, data]}
    properties = {"data": {"type": "string", **data}, **({"event": {"type": "string"}} if named else {})}
    return {"type": "object", "properties": properties, "required": list(properties)}


def request_body(model: type[BaseModel], *, computes: bool = False) -> dict[str, Any]:
    """For a route's ``openapi_extra``. ``app`` adds the component."""
    body = {"required": True, "content": {"application/json": {"schema": reference(model.__name__)}}}
    return {"requestBody": body, **({"parameters": [_TIMEOUT_PARAMETER]} if computes else {})}


def reference(schema: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{schema}"}


def without_closed_objects(schemas: dict[str, Any], names: Iterable[str]) -> None:
    """Of bodies that may have fields that nobody knows. Changes ``schemas``; what such bodies refer to is
    among ``names``."""
    for name in names:
        if schemas[name].get("additionalProperties") is False:
            del schemas[name]["additionalProperties"]
