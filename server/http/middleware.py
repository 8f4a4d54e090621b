"""Two plain ASGI middlewares: the request's id, its metrics and the last resort for faults; and the API key.
They hand ``receive`` and ``send`` on, so that a client's departure is seen by whoever waits for it."""

import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, ClientDisconnectedError, internal_error, unauthorized
from server.http.context import REQUEST_ID_KEY, RequestId
from server.http.error_answers import error_answer, is_messages_path
from server.observability.metrics import ENDPOINTS, Metrics, route_template
from server.observability.request_metrics import RequestRecord
from server.observability.tracing import PROPAGATION_HEADERS, RequestTracer

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


class Refusals:
    """What a middleware does with a request that must not reach its route: it is counted and traced like any
    other that is rejected, and answered."""

    def __init__(self, metrics: Metrics, tracer: RequestTracer | None = None) -> None:
        self._metrics = metrics
        self._tracer = tracer

    async def answer(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = ENDPOINTS.get(scope["path"])
        if endpoint is not None and scope["method"] == "POST":
            assert error.rejection is not None
            headers = {name: header_values(scope, name.encode()) for name in PROPAGATION_HEADERS}
            carrier = {name: values[0].decode("latin-1") for name, values in headers.items() if values}
            record = RequestRecord(
                self._metrics, endpoint, None, scope[REQUEST_ID_KEY].value, self._tracer, carrier
            )
            record.reject(error.rejection)
        await error_answer(scope, error)(scope, receive, send)


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
        request_id = (
            RequestId(given, is_given=True) if is_sound_request_id(given) else RequestId(uuid.uuid4().hex)
        )
        scope[REQUEST_ID_KEY] = request_id
        # Anthropic's clients look for it under a name of their own.
        id_headers = (
            (b"x-request-id", b"request-id") if is_messages_path(scope["path"]) else (b"x-request-id",)
        )
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                value = request_id.value.encode("latin-1")
                headers = [(name, value) for name in id_headers]
                message = {**message, "headers": [*message["headers"], *headers]}
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
            await error_answer(scope, internal_error())(scope, receive, send_with_id)
        finally:
            in_flight.dec()
            self._metrics.observe_http(
                scope["method"], route, status or CLIENT_CLOSED_REQUEST, time.monotonic() - started
            )


class ApiKeyMiddleware:
    """Lets a request with one of the keys pass, as Bearer token or in the header X-Api-Key; without keys
    every request. Only the probes are open. Keys are compared as digests in constant time."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], refusals: Refusals) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._digests or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        bearers, plain = header_values(scope, b"authorization"), header_values(scope, b"x-api-key")
        values = bearers + plain
        if (
            len(bearers) <= 1
            and len(plain) <= 1
            and any([self._is_bearer_known(bearers), self._is_known(plain)])
        ):
            await self._app(scope, receive, send)
            return
        await self._refusals.answer(unauthorized(presented=bool(values)), scope, receive, send)

    def _is_bearer_known(self, values: Sequence[bytes]) -> bool:
        parts = [value.partition(b" ") for value in values]
        return self._is_known([key.strip(b" ") for scheme, _, key in parts if scheme.lower() == b"bearer"])

    def _is_known(self, keys: Sequence[bytes]) -> bool:
        digests = [hashlib.sha256(key).digest() for key in keys]
        known = [hmac.compare_digest(digest, expected) for digest in digests for expected in self._digests]
        return any(known)
