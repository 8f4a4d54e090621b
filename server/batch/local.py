"""The application without a port: the same routes, checks and engine, called in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx

from model.interface.errors import ModelError
from server.app import create_app
from server.batch.run import ServerGoneError
from server.engine.request import EngineHungError
from server.settings.settings import Settings

BASE_URL = "http://localhost"


@asynccontextmanager
async def local_client(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the loaded model. Raises the ModelError of a load that failed. An engine that dies later
    cancels the block and raises ServerGoneError, one that hangs EngineHungError."""
    # Whoever runs the batch is the only client: no key, and its own concurrency is the limit.
    own = replace(settings, api_key=(), host="127.0.0.1", max_queued_requests=0, max_queued_prompt_tokens=0)
    app = create_app(own)
    task = asyncio.current_task()
    assert task is not None
    deaths: list[BaseException] = []

    def died(error: BaseException) -> None:
        deaths.append(error)
        task.cancel()

    app.state.on_engine_death = died
    try:
        async with app.router.lifespan_context(app):
            await app.state.server.loaded_once.wait()
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url=BASE_URL, timeout=None) as client:
                yield client
    except asyncio.CancelledError:
        if not deaths:
            raise
        task.uncancel()
        if isinstance(deaths[0], ModelError | EngineHungError):
            raise deaths[0] from None
        raise ServerGoneError(
            f"the engine stopped after an error: {type(deaths[0]).__name__}: {deaths[0]}"
        ) from deaths[0]
