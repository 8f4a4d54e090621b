"""The process of ``gemserve serve``. The port is bound at once, so that a taken one is noticed first; it
answers from when the headers of the checkpoint are found sound. The model then loads while the server already
answers that it is not ready. A failed load and a dead or hung engine end the process with exit code 1;
SIGTERM lets running requests finish and ends it with 0, and a second one ends them with an error event at
once."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import psutil
import uvicorn

from model.interface.errors import ConfigError, ModelError
from model.parallel.ranks import RankError
from server.loading.load import LoadedEngine, load_engine, open_weight_cache
from server.observability.logs import configure_logging
from server.settings.settings import Settings
from server.state import ServerState

if TYPE_CHECKING:
    from server.engine.async_engine import AsyncEngine
    from server.http.metrics_listener import MetricsListener

logger = logging.getLogger("gemserve")

TERMS = "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"
# Requests that the drain ended at its deadline still get to send their last event.
LAST_EVENTS_SECONDS = 2
HURRIED_EVENTS_SECONDS = 0.5
HURRY_SECONDS = 0.1  # between looks for a second signal
# Files, libraries and pipes that are open besides the clients' connections.
OTHER_DESCRIPTORS = 128
EXIT_INTERRUPTED = 130


class Server(uvicorn.Server):
    """uvicorn that ends on a fault of the engine, and lets running requests finish before it closes their
    connections."""

    def __init__(
        self, config: uvicorn.Config, state: ServerState, metrics_listener: "MetricsListener | None"
    ) -> None:
        super().__init__(config)
        self.fault: BaseException | None = None
        self._state = state
        self._metrics_listener = metrics_listener
        self._is_told_twice = False

    @property
    def has_native_work(self) -> bool:
        """A thread may be in native code, while it loads or in a step: the end of the interpreter would abort
        the process."""
        engine = self._state.engine
        # of which the loading thread knows nothing
        if self._state.is_loading or isinstance(self._state.load_error, RankError):
            return True
        return engine is not None and not engine.has_stopped

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
        tasks = [asyncio.create_task(self._hurry(engine))]
        if engine is not None:
            tasks.append(asyncio.create_task(engine.drain(self._state.settings.shutdown_timeout)))
        await super().shutdown(sockets)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called in the main thread, wherever the event loop stands just then: nothing of the loop's may be
        touched here. New requests are refused from now on; uvicorn looks for ``should_exit`` only ten times a
        second, and drains then."""
        self._state.is_stopping = True
        self._is_told_twice = self.should_exit
        self._captured_signals.append(sig)
        self.should_exit = True

    async def _hurry(self, engine: "AsyncEngine | None") -> None:
        """At a second signal, whichever, what still runs gets its error event and no more than the time to
        send it."""
        while not self._is_told_twice:  # noqa: ASYNC110  a signal handler must not touch an Event
            await asyncio.sleep(HURRY_SECONDS)
        if engine is not None:
            await engine.drain(0.0)
        await asyncio.sleep(HURRIED_EVENTS_SECONDS)
        self.force_exit = True


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
        # A signal that comes before uvicorn's own handler is set is not lost. uvicorn raises it again once it
        # has shut down; a graceful end by SIGTERM is a success.
        previous = signal.signal(signal.SIGTERM, server.handle_exit)
        try:
            with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
                runner.run(server.serve(sockets=[listener]))
        except KeyboardInterrupt:
            if server.has_native_work:
                exit_at_once(EXIT_INTERRUPTED)
            raise
        finally:
            signal.signal(signal.SIGTERM, previous)
    code = 0
    if server.fault is not None:
        _tell_fault(settings, server.fault)
        code = 1
    if server.has_native_work:
        exit_at_once(code)
    return code


def prepare(settings: Settings, metrics_socket: socket.socket | None = None) -> Server:
    """Check the checkpoint's headers and wire the application; loads no weights."""
    from model.checkpoint.open import open_checkpoint

    checkpoint = open_checkpoint(settings.model, cache_dir=settings.cache_dir)
    weight_cache = open_weight_cache(settings, checkpoint)  # read in a thread, beside the imports that follow
    reading = () if weight_cache is None else (weight_cache,)
    from server.app import create_app
    from server.http.metrics_listener import MetricsListener
    from server.http.protocol import http_protocol

    def load(settings: Settings, report_phase: Callable[[str], None]) -> LoadedEngine:
        try:
            loaded = load_engine(settings, report_phase, checkpoint, *reading)
        except ModelError:
            raise  # its text says everything
        except Exception:
            logger.exception("loading failed")
            raise
        # What a loaded server consists of never becomes garbage: later collections need not look at it. Nor
        # does this start look for the little that has: a collection would take longer than the warm-up.
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
        http=http_protocol(settings.read_timeout, allow_descriptors(settings.max_connections)),
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
    """End without tearing the interpreter down: native code of the loading thread, or of a step that goes on,
    would abort the process in that. What the process started, a compiler, ends with it."""
    for child in psutil.Process().children(recursive=True):
        # it ended meanwhile, as ranks do when one of them has
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
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


def allow_descriptors(max_connections: int) -> int:
    """Raise the process's own limit of open files to what so many connections need, as far as the system lets
    it. The number of connections that there is then room for; 0: no limit was asked for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if max_connections == 0 or soft == resource.RLIM_INFINITY or soft >= needed:
        return max_connections
    logger.warning(
        "the limit of open files, %d, leaves room for fewer connections than --max-connections", soft
    )
    return max(1, soft - OTHER_DESCRIPTORS)


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A bound socket that does not listen yet. Raises ConfigError; ``flag`` is where the port came from."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}: {error.strerror or error}; choose another --host"
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another {flag} or --host"
        ) from None
    return listener
