"""``--metrics-port``: /metrics on a listener of its own, without a key. It opens with the port of the API and
closes after it, so that loading, load and drain are all seen."""

import socket

import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.errors import method_not_supported, unknown_url
from server.http.host_check import HostMiddleware
from server.http.json_response import error_response
from server.http.protocol import http_protocol
from server.observability.metrics import CONTENT_TYPE, Metrics
from server.settings.settings import Settings

MAX_CONNECTIONS = 64


async def metrics_response(metrics: Metrics) -> Response:
    """Rendered beside the event loop, one at a time: a thousand lines take so long that streams would be seen
    to halt."""
    text = await to_thread.run_sync(metrics.render, limiter=metrics.render_limiter)
    return Response(text, headers={"content-type": CONTENT_TYPE})


class MetricsListener:
    """Serves on a socket that is bound already. ``open`` and ``close`` it in one event loop."""

    def __init__(self, listener: socket.socket, settings: Settings, metrics: Metrics) -> None:
        self._listener = listener
        app = HostMiddleware(_metrics_app(metrics), settings.host, settings.allowed_hosts, refusals=None)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http=http_protocol(settings.read_timeout, MAX_CONNECTIONS),
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)

    async def open(self) -> None:
        await self._server.startup(sockets=[self._listener])

    async def close(self) -> None:
        await self._server.shutdown(sockets=[self._listener])


def _metrics_app(metrics: Metrics) -> Starlette:
    async def scrape(request: Request) -> Response:
        return await metrics_response(metrics)

    async def not_found(request: Request, error: Exception) -> Response:
        return error_response(unknown_url(request.method, request.url.path))

    async def wrong_method(request: Request, error: Exception) -> Response:
        return error_response(method_not_supported(request.method, request.url.path, {"allow": "GET, HEAD"}))

    return Starlette(
        routes=[Route("/metrics", scrape)], exception_handlers={404: not_found, 405: wrong_method}
    )
