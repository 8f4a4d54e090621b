"""The process of ``gemserve serve``. The port is bound at once, so that a taken one is noticed first; it answers from when the
headers of the checkpoint are found sound. The model then loads while the server already answers that it is not ready. A failed
load and a dead or hung engine end the process with exit code 1; SIGTERM lets running requests finish and ends it with 0."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import uvicorn

from model.errors import ConfigError, ModelError
from server.engine.loaded import LoadedEngine, load_engine, open_weight_cache
from server.engine.request import EngineHungError
from server.logs import configure_logging
from server.settings import Settings
from server.state import ServerState

if TYPE_CHECKING:
    from server.metrics_listener import MetricsListener

logger = logging.getLogger("gemserve")

TERMS = "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"
# Requests that the drain ended at its deadline still get to send their last event.
LAST_EVENTS_SECONDS = 5
EXIT_INTERRUPTED = 130


class Server(uvicorn.Server):
    """uvicorn that ends on a fault of the engine, and lets running requests finish before it closes their connections."""

    def __init__(self, config: uvicorn.Config, state: ServerState, metrics_listener: "MetricsListener | None") -> None:
        super().__init__(config)
        self.fault: BaseException | None = None
        self._state = state
        self._metrics_listener = metrics_listener

    @property
    def is_loading(self) -> bool:
        return self._state.is_loading

    def end_with(self, fault: BaseException) -> None:
        self.fault = fault
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            logger.info("listening on %s", address_of(listener))
        if self._metrics_listener is not None:
            await self._metrics_listener.open()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await self._drain_and_shut_down(sockets)
        finally:
            if self._metrics_listener is not None:
                await self._metrics_listener.close()

    async def _drain_and_shut_down(self, sockets: list[socket.socket] | None) -> None:
        engine = self._state.engine
        if engine is None:
            await super().shutdown(sockets)
            return
        drain = asyncio.create_task(engine.drain(self._state.settings.shutdown_timeout))
        await super().shutdown(sockets)
        drain.cancel()  # still waiting only when a second signal cut the shutdown short
        with contextlib.suppress(asyncio.CancelledError):
            await drain


def serve(settings: Settings) -> int:
    """Serve until a signal or a fault. Raises ModelError for what is wrong before the port answers."""
    configure_logging(settings.log_level, settings.log_format)
    if settings.log_format == "json":
        logger.info(TERMS)
    else:
        print(TERMS, file=sys.stderr, flush=True)
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(contextlib.closing(bind(settings.host, settings.port, "--port")))
        metrics_socket = None
        if settings.metrics_port is not None:
            metrics_socket = sockets.enter_context(
                contextlib.closing(bind(settings.host, settings.metrics_port, "--metrics-port"))
            )
        server = prepare(settings, metrics_socket)
        # uvicorn raises the signal again once it has shut down; a graceful end by SIGTERM is a success.
        previous = signal.signal(signal.SIGTERM, lambda signum, frame: None)
        try:
            with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
                runner.run(server.serve(sockets=[listener]))
        finally:
            signal.signal(signal.SIGTERM, previous)
            if server.is_loading:
                exit_at_once(EXIT_INTERRUPTED if isinstance(sys.exception(), KeyboardInterrupt) else 0)
    if server.fault is not None:
        _tell_fault(settings, server.fault)
        if isinstance(server.fault, EngineHungError):
            exit_at_once(1)
        return 1
    return 0


def prepare(settings: Settings, metrics_socket: socket.socket | None = None) -> Server:
    """Check the checkpoint's headers and wire the application; loads no weights."""
    from model.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(settings.model, cache_dir=settings.cache_dir)
    weight_cache = open_weight_cache(settings, checkpoint)  # read in a thread, beside the imports that follow
    reading = () if weight_cache is None else (weight_cache,)
    from server.app import create_app
    from server.http_protocol import http_protocol
    from server.metrics_listener import MetricsListener

    def load(settings: Settings, report_phase: Callable[[str], None]) -> LoadedEngine:
        try:
            loaded = load_engine(settings, report_phase, checkpoint, *reading)
        except ModelError:
            raise  # its text says everything
        except Exception:
            logger.exception("loading failed")
            raise
        # What a loaded server consists of never becomes garbage: later collections need not look at it. Nor does this start
        # look for the little that has: a collection would take longer than the warm-up.
        gc.freeze()
        gc.enable()
        return loaded

    app = create_app(settings, engine_factory=load)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=settings.log_level == "debug",
        timeout_keep_alive=settings.keep_alive_timeout,
        timeout_graceful_shutdown=int(settings.shutdown_timeout) + LAST_EVENTS_SECONDS,
        http=http_protocol(settings.read_timeout),
        ws="none",
        server_header=False,
    )
    metrics_listener = None
    if metrics_socket is not None:
        logger.info("metrics on %s/metrics", address_of(metrics_socket))
        metrics_listener = MetricsListener(metrics_socket, settings, app.state.server.metrics)
    server = Server(config, app.state.server, metrics_listener)
    app.state.on_engine_death = server.end_with
    return server


def exit_at_once(code: int) -> NoReturn:
    """End without tearing the interpreter down: native code of the loading thread, or of a step that hangs,
    would abort the process in that."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _tell_fault(settings: Settings, fault: BaseException) -> None:
    """The last line of the log."""
    if settings.log_format == "json":
        logger.critical(_one_line(fault))
    else:
        print(f"gemserve: error: {_one_line(fault)}", file=sys.stderr)


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _one_line(fault: BaseException) -> str:
    text = " ".join(str(fault).split())
    return text if isinstance(fault, ModelError) else f"{type(fault).__name__}: {text}"


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A bound socket that does not listen yet. Raises ConfigError; ``flag`` is where the port came from."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror or error}; choose another --host") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another {flag} or --host") from None
    return listener
