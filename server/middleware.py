"""Two plain ASGI middlewares: the request's id, its metrics and the last resort for faults; and the API key. They hand
``receive`` and ``send`` on, so that a client's departure is seen by whoever waits for it."""

import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.context import REQUEST_ID_KEY, RequestId
from server.api.responses import error_response
from server.errors import ClientDisconnectedError, internal_error, unauthorized
from server.metrics import ENDPOINTS, Metrics, route_template

logger = logging.getLogger("gemserve.http")

# Probes come from orchestrators, which hold no key.
OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
MAX_REQUEST_ID_CHARACTERS = 128
CLIENT_CLOSED_REQUEST = 499


def is_sound_request_id(given: str) -> bool:
    """Short and printable: fit to be sent back and logged."""
    return 0 < len(given) <= MAX_REQUEST_ID_CHARACTERS and all("!" <= character <= "~" for character in given)


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key.lower() == name]


class RequestContextMiddleware:
    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        values = header_values(scope, b"x-request-id")
        given = values[0].decode("latin-1") if values else ""
        request_id = RequestId(given, is_given=True) if is_sound_request_id(given) else RequestId(uuid.uuid4().hex)
        scope[REQUEST_ID_KEY] = request_id
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.value.encode("latin-1"))]}
            await send(message)

        route = route_template(scope["path"])
        started = time.monotonic()
        in_flight = self._metrics.http_in_flight.labels(route)
        in_flight.inc()
        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnectedError:
            status = status or CLIENT_CLOSED_REQUEST
        except Exception:
            logger.exception("request %s failed", request_id.value)
            if status:
                raise  # half an answer is out: the connection must not look sound
            await error_response(internal_error())(scope, receive, send_with_id)
        finally:
            in_flight.dec()
            self._metrics.observe_http(scope["method"], route, status or CLIENT_CLOSED_REQUEST, time.monotonic() - started)


class ApiKeyMiddleware:
    """Lets a request with one of the keys pass; without keys every request. Only the probes are open. Keys are compared as
    digests in constant time."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], metrics: Metrics) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._digests or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        values = header_values(scope, b"authorization")
        if self._is_known(values):
            await self._app(scope, receive, send)
            return
        endpoint = ENDPOINTS.get(scope["path"])
        if endpoint is not None and scope["method"] == "POST":
            self._metrics.observe_rejection(endpoint, "unauthorized")
        await error_response(unauthorized(presented=bool(values)))(scope, receive, send)

    def _is_known(self, values: Sequence[bytes]) -> bool:
        if len(values) != 1:
            return False
        scheme, _, key = values[0].partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        digest = hashlib.sha256(key.strip(b" ")).digest()
        known = [hmac.compare_digest(digest, expected) for expected in self._digests]
        return any(known)
