"""/openapi.json: what the framework knows of the routes, completed with the schemas that it does not see,
since bodies are read and streams written by hand. It describes this server, with its settings."""

from collections.abc import Iterable
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter

from server.api.chat.answer import ChatCompletionChunk
from server.api.chat.request import ChatCompletionRequest
from server.api.completions.answer import CompletionChunk
from server.api.completions.request import CompletionRequest
from server.api.decisions.request import DecisionRequest
from server.api.description import without_closed_objects
from server.api.embeddings.request import EmbeddingRequest
from server.api.messages.answer import Event as MessageEvent
from server.api.messages.request import CountTokensRequest, MessagesRequest
from server.api.responses.answer import Event as ResponseEvent
from server.api.responses.request import ResponseItem, ResponseRequest
from server.api.tokenize.request import DetokenizeRequest, TokenizeRequest
from server.http.middleware import OPEN_PATHS
from server.settings.settings import Settings

_BODIES: tuple[type[BaseModel], ...] = (
    CompletionRequest,
    ChatCompletionRequest,
    ResponseRequest,
    ResponseItem,
    MessagesRequest,
    CountTokensRequest,
    EmbeddingRequest,
    DecisionRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
# Of streams, which no route names as its answer.
_EVENTS = (CompletionChunk, ChatCompletionChunk, ResponseEvent, MessageEvent)
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}


def openapi_document(app: FastAPI, settings: Settings) -> dict[str, Any]:
    """Made once per application."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = document["components"]["schemas"]
        # The framework describes an answer of its own to wrong parameters; this server never gives it.
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        bodies = _schemas(_BODIES, "validation")
        if not settings.strict_params:
            without_closed_objects(bodies, bodies)
        _add(schemas, bodies)
        _add(schemas, _schemas(_EVENTS, "serialization"))
        if settings.api_key or settings.api_key_file is not None:
            document["components"]["securitySchemes"] = _KEYS
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    operation["security"] = [] if path in OPEN_PATHS else [{name: []} for name in _KEYS]
        app.openapi_schema = document
    return app.openapi_schema


def _schemas(types: Iterable[Any], mode: Literal["validation", "serialization"]) -> dict[str, Any]:
    """The schemas of pydantic models or TypedDicts, and of what they refer to, by their names."""
    adapters = [(str(number), mode, TypeAdapter(kind)) for number, kind in enumerate(types)]
    schemas: dict[str, Any] = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")[
        1
    ]["$defs"]
    return schemas


def _add(schemas: dict[str, Any], more: dict[str, Any]) -> None:
    for name, schema in more.items():
        assert schemas.setdefault(name, schema) == schema, f"two models are called {name}"
