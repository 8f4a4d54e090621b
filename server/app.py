"""``create_app``: the only place that wires settings, engine, routes, middleware and metrics together.

The port can be bound before the model is there: the lifespan starts a thread that loads it, and until it is
done the readiness probe answers 503 with the phase. A failure of the load or of the engine is told to
``app.state.on_engine_death``, which the command line sets to end the process.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from server.api.chat import routes as chat
from server.api.completions import routes as completions
from server.api.decisions import routes as decisions
from server.api.embeddings import routes as embeddings
from server.api.messages import routes as messages_routes
from server.api.meta import docs as docs_routes
from server.api.meta import info as info_routes
from server.api.meta.openapi import openapi_document
from server.api.responses import routes as responses
from server.api.tokenize import routes as tokenize_routes
from server.engine.memory_readings import MemoryReadings
from server.engine.stats import StepStats
from server.errors import (
    ApiError,
    ClientDisconnectedError,
    invalid_request,
    method_not_supported,
    unknown_url,
)
from server.http.api_keys import api_keys
from server.http.error_answers import error_answer
from server.http.host_check import HostMiddleware
from server.http.middleware import CLIENT_CLOSED_REQUEST, ApiKeyMiddleware, Refusals, RequestContextMiddleware
from server.http.unread_body import UnreadBodyMiddleware
from server.loading.load import LoadedEngine, load_engine
from server.observability.engine_metrics import EngineCollector
from server.observability.load_tracer import load_tracer
from server.observability.metrics import Metrics
from server.observability.stats_log import log_stats
from server.observability.tracing import RequestTracer
from server.observability.vllm_metrics import VllmCollector
from server.settings.settings import Settings
from server.state import ServerState
from server.version import __version__

logger = logging.getLogger("gemserve.app")

# Loads what the settings name; the second argument is told the name of each phase as it begins.
EngineFactory = Callable[[Settings, Callable[[str], None]], LoadedEngine]
LAST_TRACES_SECONDS = 5.0


def create_app(
    settings: Settings, *, engine_factory: EngineFactory | None = None, tracer: RequestTracer | None = None
) -> FastAPI:
    """The application. ``app.state.server`` is its ServerState; ``app.state.on_engine_death`` may be set at
    any time. ``tracer`` takes the place of what the settings say. Raises ConfigError when tracing is asked
    for and cannot be had."""
    metrics = Metrics(settings)
    state = ServerState(settings, metrics)
    state.tracer = load_tracer(settings) if tracer is None else tracer
    metrics.registry.register(EngineCollector(state))
    if settings.metrics_compat == "vllm":
        metrics.registry.register(VllmCollector(metrics, state))
    factory = load_engine if engine_factory is None else engine_factory

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        _start_loading(app, state, factory)
        interval = settings.log_stats_interval
        stats_log = asyncio.create_task(log_stats(state, metrics, interval)) if interval else None
        grammar_warm_up = asyncio.create_task(_warm_up_grammars(state))
        try:
            yield
        finally:
            state.is_stopping = True
            if stats_log is not None:
                stats_log.cancel()
            grammar_warm_up.cancel()
            if state.loaded is not None:
                # the command line has waited for running requests before
                await state.loaded.engine.drain(0.0)
                await state.loaded.engine.stop()
                state.loaded.grammars.close()
                # A step that goes on uses what would be closed, and the process ends without it.
                if state.loaded.close is not None and state.loaded.engine.has_stopped:
                    await asyncio.to_thread(state.loaded.close)
            if state.tracer is not None:
                await _close_tracer(state.tracer)

    app = FastAPI(
        title="gemserve",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # its page loads scripts from elsewhere; docs_routes has one that does not
        redoc_url=None,
        # The framework would otherwise send traces, metrics and logs of its own wherever the variables of
        # OpenTelemetry point to.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.server = state
    app.state.on_engine_death = _log_death
    app.include_router(completions.create_router())
    app.include_router(chat.create_router())
    app.include_router(responses.create_router())
    app.include_router(messages_routes.create_router())
    app.include_router(embeddings.create_router())
    app.include_router(decisions.create_router())
    app.include_router(info_routes.create_router(serves_metrics=settings.metrics_port is None))
    app.include_router(tokenize_routes.create_router())
    app.include_router(docs_routes.create_router())
    # The last one added is the outermost.
    refusals = Refusals(metrics, state.tracer)
    app.add_middleware(ApiKeyMiddleware, keys=api_keys(settings), refusals=refusals)
    app.add_middleware(
        HostMiddleware, host=settings.host, allowed_hosts=settings.allowed_hosts, refusals=refusals
    )
    app.add_middleware(RequestContextMiddleware, metrics=metrics)
    app.add_middleware(UnreadBodyMiddleware, read_timeout=settings.read_timeout)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ClientDisconnectedError, _on_disconnect)
    app.openapi = lambda: openapi_document(app, settings)  # type: ignore[method-assign]
    return app


async def _warm_up_grammars(state: ServerState) -> None:
    await state.loaded_once.wait()
    loaded = state.loaded
    assert loaded is not None
    stats, num_steps = loaded.engine.stats, 0

    def is_idle() -> bool:
        """Nothing runs, nor has anything run since the last call: short requests come and go between two of
        them."""
        nonlocal num_steps
        before, num_steps = num_steps, sum(stats.steps_total.values())
        return num_steps == before and stats.num_running + stats.num_waiting == 0

    try:
        await loaded.grammars.warm_up_when_idle(is_idle)
    except Exception as error:  # the first request with a constraint tries again, and is told
        logger.warning("structured output could not be prepared: %s", str(error) or type(error).__name__)


def _log_death(error: BaseException) -> None:
    logger.critical("the engine is gone: %s", error)


async def _close_tracer(tracer: RequestTracer) -> None:
    """Sends the last traces, and leaves them where the collector does not answer in time."""
    loop, closed = asyncio.get_running_loop(), asyncio.Event()

    def close() -> None:
        tracer.close()
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has waited long enough
            loop.call_soon_threadsafe(closed.set)

    threading.Thread(target=close, name="gemserve-traces", daemon=True).start()
    try:
        async with asyncio.timeout(LAST_TRACES_SECONDS):
            await closed.wait()
    except TimeoutError:
        logger.warning("the last traces were not taken within %g seconds", LAST_TRACES_SECONDS)


def _start_loading(app: FastAPI, state: ServerState, factory: EngineFactory) -> None:
    """Load in a daemon thread: a process that is told to stop while loading does not wait for it."""
    loop = asyncio.get_running_loop()

    def in_loop(callback: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped in the meantime
            loop.call_soon_threadsafe(callback, *args)

    def set_phase(phase: str) -> None:
        state.phase = phase

    def died(error: BaseException) -> None:
        app.state.on_engine_death(error)

    def loaded(engine: LoadedEngine) -> None:
        if state.is_stopping:
            if engine.close is not None:
                engine.close()
            return
        memory = state.memory = MemoryReadings(engine.read_memory)

        def on_step(step: StepStats) -> None:
            state.metrics.observe_step(step)
            memory.refresh()

        engine.engine.on_step = on_step
        engine.engine.on_death = died
        engine.engine.step_timeout = state.settings.step_timeout
        engine.engine.start()
        engine.watch(engine.engine.fail)
        state.loaded = engine
        state.phase = "ready"
        state.loaded_once.set()
        logger.info("ready: serving %s", ", ".join(engine.model_names))

    def failed(error: BaseException) -> None:
        state.load_error = error
        state.phase = "failed"
        died(error)

    def load() -> None:
        try:
            engine = factory(state.settings, lambda phase: in_loop(set_phase, phase))
        except BaseException as error:  # whatever ends the load is told to the command line
            in_loop(failed, error)
        else:
            in_loop(loaded, engine)

    threading.Thread(target=load, name="gemserve-load", daemon=True).start()


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_answer(request.scope, error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Raised by the router alone: no such path, or not this method."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    if error.status_code == 404:
        return error_answer(request.scope, unknown_url(request.method, path))
    if error.status_code == 405:
        return error_answer(request.scope, method_not_supported(request.method, path, error.headers))
    return error_answer(request.scope, ApiError(error.status_code, str(error.detail), headers=error.headers))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    """Bodies are checked by ``api.generation.validation``; what is left to the framework are path
    parameters."""
    return error_answer(request.scope, invalid_request("The request is not valid.", code="invalid_value"))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
