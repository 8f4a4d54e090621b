"""What /openapi.json promises of answers, held against answers: `LiveServer` checks every one that a test
gets. Objects of the description are closed here: an answer with a field that it does not name is a fault
too."""

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs

from server.app import create_app
from server.settings.settings import Settings

EVENTS, JSON = "text/event-stream", "application/json"


@functools.cache
def document() -> dict[str, Any]:
    """Of a server with default settings; what settings change of it is said of requests alone."""
    found: dict[str, Any] = json.loads(json.dumps(create_app(Settings()).openapi()))
    return found


def closed(value: Any) -> Any:
    """The schema with no properties but those named, in objects that name any."""
    if isinstance(value, list):
        return [closed(item) for item in value]
    if not isinstance(value, dict):
        return value
    rest = {name: closed(item) for name, item in value.items()}
    if isinstance(rest.get("properties"), dict):
        rest.setdefault("additionalProperties", False)
    return rest


@functools.cache
def _components() -> dict[str, Any]:
    components: dict[str, Any] = {"schemas": closed(document()["components"]["schemas"])}
    return components


@functools.cache
def _validator(schema: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for({**closed(json.loads(schema)), "components": _components()})


def validate(schema: Any, value: Any) -> None:
    errors = [
        f"{'/'.join(map(str, error.instance_path))}: {error.message}" for error in _errors(schema, value)
    ]
    assert not errors, f"{errors[:3]}\nof {json.dumps(value)[:2000]}"


def _errors(schema: Any, value: Any) -> Iterator[jsonschema_rs.ValidationError]:
    return iter(_validator(json.dumps(schema, sort_keys=True)).iter_errors(value))


def operation_of(method: str, path: str) -> dict[str, Any] | None:
    """None for what the description does not name: wrong paths and methods, and itself."""
    for template, operations in document()["paths"].items():
        if re.fullmatch(re.sub(r"\{\w+\}", ".+", template), path) and method.lower() in operations:
            operation: dict[str, Any] = operations[method.lower()]
            return operation
    return None


def check_answer(response: httpx.Response, *, reads_streams: bool = True) -> None:
    """Raises AssertionError where the description does not allow the answer."""
    request = response.request
    operation = operation_of(request.method, request.url.path)
    if operation is None:
        return
    where = f"{request.method} {request.url.path}: {response.status_code}"
    declared = operation["responses"].get(str(response.status_code))
    assert declared is not None, f"{where} is not declared"
    for name, header in declared["headers"].items():
        given = response.headers.get(name)
        assert given is not None or not header["required"], f"{where} lacks the header {name}"
        assert given is None or header["schema"]["type"] != "integer" or given.isdecimal(), (
            f"{where}: {name} is {given!r}"
        )
    media_type = response.headers["content-type"].partition(";")[0]
    assert media_type in declared["content"], f"{where} is {media_type}"
    content = declared["content"][media_type]
    if media_type == JSON:
        response.read()
        validate(content["schema"], response.json())
    elif media_type == EVENTS and reads_streams:
        for event in events(response.text):
            check_event(content["itemSchema"], event)


def events(text: str) -> Iterator[dict[str, str]]:
    """Events of a stream that is over, by the names of their fields; comments are none."""
    assert text == "" or text.endswith("\n\n")
    for block in text.split("\n\n"):
        lines = [line.partition(": ") for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            yield {name: value for name, _, value in lines}


def check_event(schema: Any, event: dict[str, str]) -> None:
    """Validators leave out the content of strings, so it is looked at here."""
    validate(schema, event)
    data = schema["properties"]["data"]
    ends = [part["const"] for part in data.get("anyOf", ()) if "const" in part]
    if event["data"] in ends:
        return
    (content,) = [part["contentSchema"] for part in (data, *data.get("anyOf", ())) if "contentSchema" in part]
    value = json.loads(event["data"])
    validate(content, value)
    if "event" in event:
        assert event["event"] == value["type"]
