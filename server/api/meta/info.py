"""GET routes about the server: models, health, metrics, version. None of them waits for the engine."""

from typing import Annotated, Any, Literal, NotRequired

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from server.api.description import answers
from server.api.generation.wire_values import optional
from server.errors import RETRY_AFTER_SECONDS, check_model
from server.http.context import state_of
from server.http.json_response import JsonResponse
from server.http.metrics_listener import metrics_response
from server.state import ServerState, Status
from server.version import __version__


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    default_sampling: dict[str, Any]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class HealthResponse(TypedDict):
    status: Status
    phase: NotRequired[Annotated[str | None, optional(None)]]


class VersionResponse(TypedDict):
    name: str
    version: str


_HEALTH = answers(HealthResponse, is_open=True, unavailable=HealthResponse)


def model_card(state: ServerState, name: str) -> ModelCard:
    """``default_sampling`` are the values that hold when a request names none."""
    loaded = state.require_loaded()
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "gemserve",
        "root": loaded.model_names[0],
        "parent": None,
        "max_model_len": loaded.engine.limits.max_model_len,
        "default_sampling": {
            "temperature": float(state.effective_default("temperature", 1.0)),
            "top_p": float(state.effective_default("top_p", 1.0)),
            "top_k": int(state.effective_default("top_k", 0)),
        },
    }


def _health(state: ServerState, *, alive: bool) -> Response:
    status = state.status
    body: HealthResponse = {"status": status}
    if status == "loading":
        body["phase"] = state.phase
    if status == "ok" or (alive and status != "dead"):
        return JsonResponse(body)
    return JsonResponse(body, 503, {"retry-after": str(RETRY_AFTER_SECONDS)})


def create_router(*, serves_metrics: bool = True) -> APIRouter:
    """``serves_metrics``: false where /metrics has a listener of its own."""
    router = APIRouter()

    @router.get("/v1/models", responses=answers(ModelList))
    async def list_models(request: Request) -> Response:
        state = state_of(request)
        names = state.require_loaded().model_names
        body: ModelList = {"object": "list", "data": [model_card(state, name) for name in names]}
        return JsonResponse(body)

    @router.get("/v1/models/{model_id:path}", responses=answers(ModelCard, knows_models=True))
    async def show_model(request: Request, model_id: str) -> Response:
        state = state_of(request)
        check_model(model_id, state.require_loaded().model_names)
        return JsonResponse(model_card(state, model_id))

    @router.get("/health", responses=_HEALTH)
    async def health(request: Request) -> Response:
        """200 when requests are served."""
        return _health(state_of(request), alive=False)

    @router.get("/health/ready", responses=_HEALTH)
    async def ready(request: Request) -> Response:
        """The same as /health."""
        return _health(state_of(request), alive=False)

    @router.get("/health/live", responses=_HEALTH)
    async def live(request: Request) -> Response:
        """200 unless the engine has died: loading and draining are no reason to restart the process."""
        return _health(state_of(request), alive=True)

    if serves_metrics:

        @router.get("/metrics", response_class=Response, responses=answers(None))
        async def metrics(request: Request) -> Response:
            return await metrics_response(state_of(request).metrics)

    @router.get("/version", responses=answers(VersionResponse))
    async def version(request: Request) -> Response:
        body: VersionResponse = {"name": "gemserve", "version": __version__}
        return JsonResponse(body)

    return router
