"""/openapi.json: what the framework knows of the routes, completed with the schemas that it does not see,
since bodies are read and streams written by hand. It describes this server, with its settings."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.api.chat.request import ChatCompletionRequest
from server.api.completions.request import CompletionRequest
from server.api.decisions.request import DecisionRequest
from server.api.embeddings.routes import EmbeddingRequest
from server.api.messages.request import CountTokensRequest, MessagesRequest
from server.api.responses.request import ResponseItem, ResponseRequest
from server.api.schemas.description import without_closed_objects
from server.api.schemas.streams import STREAM_SCHEMAS
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
        bodies = _schemas(_BODIES, is_request=True)
        if not settings.strict_params:
            without_closed_objects(bodies, bodies)
        _add(schemas, bodies)
        _add(schemas, _schemas(STREAM_SCHEMAS, is_request=False))
        if settings.api_key or settings.api_key_file is not None:
            document["components"]["securitySchemes"] = _KEYS
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    operation["security"] = [] if path in OPEN_PATHS else [{name: []} for name in _KEYS]
        app.openapi_schema = document
    return app.openapi_schema


def _schemas(models: tuple[type[BaseModel], ...], *, is_request: bool) -> dict[str, Any]:
    found = models_json_schema(
        [(model, "validation" if is_request else "serialization") for model in models],
        ref_template="#/components/schemas/{model}",
    )
    schemas: dict[str, Any] = found[1]["$defs"]
    return schemas


def _add(schemas: dict[str, Any], more: dict[str, Any]) -> None:
    for name, schema in more.items():
        assert schemas.setdefault(name, schema) == schema, f"two models are called {name}"
