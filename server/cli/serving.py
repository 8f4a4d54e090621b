"""The process of ``gemserve serve``. The port is bound at once, so that a taken one is noticed first; it answers from when the
headers of the checkpoint are found sound. The model then loads while the server already answers that it is not ready. A failed
load and a dead engine end the process with exit code 1; SIGTERM lets running requests finish and ends it with 0."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn

from model.errors import ConfigError, ModelError
from server.engine.loaded import LoadedEngine, load_engine
from server.settings import Settings

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint

logger = logging.getLogger("gemserve")

TERMS = "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"
# Requests that the drain ended at its deadline still get to send their last event.
LAST_EVENTS_SECONDS = 5


class LoadAndWatch:
    """Loads the engine for the app, and knows afterwards why the process has to end."""

    def __init__(self, checkpoint: "Checkpoint", address: str) -> None:
        self.loading = False
        self.loaded: LoadedEngine | None = None
        self._checkpoint = checkpoint
        self._address = address
        self._load_error: BaseException | None = None

    def __call__(self, settings: Settings, report_phase: Callable[[str], None] = lambda phase: None) -> LoadedEngine:
        self.loading = True
        try:
            self.loaded = load_engine(settings, report_phase, self._checkpoint)
        except BaseException as error:
            self._load_error = error
            raise
        finally:
            self.loading = False
        logger.info("ready: %s on %s", ", ".join(self.loaded.model_names), self._address)
        return self.loaded

    @property
    def fault(self) -> str | None:
        """One line about what ended the load or the engine."""
        if self._load_error is not None:
            prefix = "" if isinstance(self._load_error, ModelError) else f"loading failed: {type(self._load_error).__name__}: "
            return f"{prefix}{self._load_error}"
        if self.loaded is not None and self.loaded.engine.error is not None:
            error = self.loaded.engine.error
            return f"the engine stopped: {type(error).__name__}: {error}"
        return None


class Server(uvicorn.Server):
    """uvicorn that ends on a fault, and lets the engine drain before connections are closed."""

    def __init__(self, config: uvicorn.Config, engine: LoadAndWatch, shutdown_timeout: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._shutdown_timeout = shutdown_timeout

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._engine.fault is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._engine.loaded is None:
            await super().shutdown(sockets)
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._engine.loaded.engine.drain(self._shutdown_timeout))
            await super().shutdown(sockets)


def serve(settings: Settings) -> int:
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True
    )
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    print(TERMS, file=sys.stderr, flush=True)
    with contextlib.closing(bind(settings.host, settings.port)) as listener:
        from model.checkpoint import open_checkpoint

        checkpoint = open_checkpoint(settings.model, cache_dir=settings.cache_dir)
        from server.app import create_app

        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        engine = LoadAndWatch(checkpoint, address)
        config = uvicorn.Config(
            create_app(settings, engine_factory=engine),
            log_config=None,
            access_log=settings.log_level == "debug",
            timeout_keep_alive=settings.keep_alive_timeout,
            timeout_graceful_shutdown=int(settings.shutdown_timeout) + LAST_EVENTS_SECONDS,
            ws="none",
            server_header=False,
        )
        # uvicorn sends itself the signal again once it has shut down; a graceful end by SIGTERM is a success.
        signal.signal(signal.SIGTERM, lambda signum, frame: None)
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(_serve(Server(config, engine, settings.shutdown_timeout), listener, engine))
    if engine.fault is not None:
        print(f"gemserve: error: {engine.fault}", file=sys.stderr)
        return 1
    return 0


async def _serve(server: Server, listener: socket.socket, engine: LoadAndWatch) -> None:
    await server.serve(sockets=[listener])
    if engine.loading:  # the loading thread cannot be interrupted, and nothing waits for its model any more
        sys.stderr.flush()
        os._exit(0)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises ConfigError."""
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
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --port or --host") from None
    return listener
