"""From the bytes of a request to a checked model: size, content type, UTF-8, JSON, then types and ranges.
Every failure is an ApiError in OpenAI's shape that names the field by its dotted path; messages stay short
whatever was sent."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from server.admission import BodyTicket
from server.api.generation.request import FIELDS_WITHOUT_MEANING
from server.api.generation.unsupported import remove_unsupported
from server.api.generation.wire_values import WireModel
from server.errors import (
    ApiError,
    ClientDisconnectedError,
    body_too_slow,
    invalid_request,
    request_too_large,
    shorten,
)

IGNORED_HEADER = "x-gemserve-ignored-parameters"
_HEADER_UNSAFE = re.compile(r"[^][A-Za-z0-9_.-]")
_MAX_HEADER_CHARACTERS = 1000
MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_NESTING = 64
_MAX_REPORTED_ERRORS = 5

Model = TypeVar("Model", bound=WireModel)


@dataclass(frozen=True, slots=True)
class ParsedRequest(Generic[Model]):
    """The checked body, and the names of fields that were accepted without effect."""

    body: Model
    ignored: tuple[str, ...]

    def headers(self) -> dict[str, str]:
        """Of the answer: names what had no effect."""
        if not self.ignored:
            return {}
        safe = (_HEADER_UNSAFE.sub("?", name[:128]) for name in self.ignored)
        return {IGNORED_HEADER: ", ".join(safe)[:_MAX_HEADER_CHARACTERS]}


async def read_json_object(
    request: Request, ticket: BodyTicket, timeout_seconds: float | None
) -> dict[str, Any]:
    """The body as a JSON object. The size is counted while the body arrives, so that a lie in Content-Length
    buys nothing; all of it has to arrive within ``timeout_seconds``."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        got = repr(shorten(content_type, 60)) if content_type else "none"
        raise invalid_request(f"Expected the header Content-Type: application/json, got {got}.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > MAX_BODY_BYTES:
        raise request_too_large(MAX_BODY_BYTES)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_seconds):
            async for piece in request.stream():
                body += piece
                ticket.arrived(len(piece))
                if len(body) > MAX_BODY_BYTES:
                    raise request_too_large(MAX_BODY_BYTES)
    except ClientDisconnect:
        raise ClientDisconnectedError from None
    except TimeoutError:
        assert timeout_seconds is not None
        raise body_too_slow(timeout_seconds) from None
    value = _decode(bytes(body))
    # Depth is looked for only where there are enough brackets for it.
    if body.count(b"[") + body.count(b"{") > MAX_NESTING and _is_deeper(value, MAX_NESTING):
        raise invalid_request(
            f"The request body is nested too deeply: at most {MAX_NESTING} levels are read."
        )
    if not isinstance(value, dict):
        raise invalid_request(
            "We could not parse the JSON body of your request as an object: expected {…} with the parameters."
        )
    return value


def _decode(body: bytes) -> object:
    start = "We could not parse the JSON body of your request"
    try:
        # A constant is NaN, Infinity or -Infinity: not JSON, though Python would take it.
        return json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise invalid_request(f"{start}: it is not valid UTF-8 at byte {error.start}.") from None
    except json.JSONDecodeError as error:
        raise invalid_request(f"{start}: {error.msg} at line {error.lineno}, column {error.colno}.") from None
    except RecursionError:
        raise invalid_request(f"{start}: it is nested too deeply.") from None
    except ValueError as error:  # a constant, or an integer of thousands of digits
        raise invalid_request(f"{start}: {shorten(str(error), 100)}.") from None


def _is_deeper(value: object, levels: int) -> bool:
    """Whether lists and objects are nested more than ``levels`` deep."""
    containers: list[Any] = [value] if isinstance(value, (list, dict)) else []
    while containers and levels:
        levels -= 1
        children = (
            container.values() if isinstance(container, dict) else container for container in containers
        )
        containers = [child for values in children for child in values if isinstance(child, (list, dict))]
    return bool(containers)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def parse_request(model: type[Model], body: dict[str, Any], *, strict_params: bool) -> ParsedRequest[Model]:
    """Check types and ranges. Unknown fields, at any depth, are refused under ``strict_params`` and reported
    as ignored otherwise."""
    body = remove_unsupported(body, model.model_fields)
    # null means the default: the same as absent
    body = {name: value for name, value in body.items() if value is not None}
    ignored = body.keys() & FIELDS_WITHOUT_MEANING
    try:
        try:
            checked = model.model_validate(body)
        except ValidationError as error:
            problems = error.errors(include_url=False)
            others = [item for item in problems if item["type"] != "extra_forbidden"]
            if strict_params or others:
                raise api_error(problems if strict_params else others) from None
            ignored |= {_path(item) for item in problems}
            checked = _without_unknown(model, body)
    except RecursionError:
        raise invalid_request("The request body is nested too deeply.") from None
    return ParsedRequest(checked, tuple(sorted(ignored)))


def _without_unknown(model: type[Model], body: dict[str, Any]) -> Model:
    """What holds for a list as a whole is checked only once its items are sound, so there may be more that is
    wrong."""
    try:
        return model.model_validate(body, extra="ignore")
    except ValidationError as error:
        raise api_error(error.errors(include_url=False)) from None


def api_error(found: Sequence[Mapping[str, Any]]) -> ApiError:
    """Of pydantic's problems, the first decides code and param; a few more follow in the message."""
    first = found[0]
    message = _sentence(first)
    if len(found) > 1:
        others = ", ".join(f"'{shorten(_path(item), 60)}'" for item in found[1:_MAX_REPORTED_ERRORS])
        message += f" Also invalid: {others}{' and more' if len(found) > _MAX_REPORTED_ERRORS else ''}."
    return invalid_request(message, param=_path(first), code=_code(first))


def _path(item: Mapping[str, Any]) -> str:
    path = ""
    for part in item["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _code(item: Mapping[str, Any]) -> str:
    kind: str = item["type"]
    context: Mapping[str, Any] = item.get("ctx", {})
    match kind:
        case "missing":
            return "missing_required_parameter"
        case "extra_forbidden":
            return "unknown_parameter"
        case "greater_than_equal" | "less_than_equal":
            limit = context["ge" if kind == "greater_than_equal" else "le"]
            number = "integer" if isinstance(limit, int) else "decimal"
            return f"{number}_{'below_min' if kind == 'greater_than_equal' else 'above_max'}_value"
        case "too_long":
            return "array_above_max_length"
        case "too_short":
            return "empty_array"
        case "string_too_long":
            return "string_above_max_length"
        case "string_too_short":
            return "empty_string"
        case "finite_number" | "literal_error" | "string_unicode":
            return "invalid_value"
        case "int_parsing_size":
            return "integer_above_max_value"
        case _ if kind.endswith("_type") or kind in {"int_from_float", "none_required"}:
            return "invalid_type"
        case _:
            return kind  # our own checks name their code


def _sentence(item: Mapping[str, Any]) -> str:
    name = shorten(_path(item), 100)
    match item["type"]:
        case "missing":
            return f"Missing required parameter: '{name}'."
        case "extra_forbidden":
            return f"Unknown parameter: '{name}'."
    text = shorten(str(item["msg"]), 300)
    return f"Invalid value for '{name}': {text[:1].lower()}{text[1:]}{_shown(item.get('input'))}."


def _shown(value: object) -> str:
    if isinstance(value, (bool, int, float)):
        return f", got {shorten(json.dumps(value), 40)}"
    return ""
