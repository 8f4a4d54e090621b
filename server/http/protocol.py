"""uvicorn's HTTP protocol with bounds that it does not have itself, on connections and on the head of a
request. A head that is too large is answered with 431, one that does not arrive in time with 408, and a
connection that asks nothing is closed. For a connection beyond the limit an idle one is closed; where none is
idle, it is answered with 503. What has no sound head never reaches the application, so it is neither counted
nor logged there. What of uvicorn's inside this relies on: tests/server/http/test_uvicorn_internals.py."""

import asyncio
import itertools
from typing import TYPE_CHECKING, Literal

from server.errors import ApiError, too_many_connections
from server.http.json_response import encode_json

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

MAX_HEAD_BYTES = 64 * 1024  # request line and headers
MAX_HEADERS = 256
# Closing while the client still sends would make its system drop the answer: what comes is thrown away for so
# long.
LINGER_SECONDS = 1.0
# Refused connections that may still be open to get their answer; what comes beyond them is closed without
# one.
MAX_REFUSED_CONNECTIONS = 32

_PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


def http_protocol(read_timeout: float, max_connections: int = 0) -> type[asyncio.Protocol] | Literal["auto"]:
    """The class for ``uvicorn.Config(http=...)``. ``read_timeout`` in seconds; 0: no limit, of either.
    Without httptools, as on PyPy, uvicorn's own choice, which bounds the size of a head alone."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
    except ImportError:
        return "auto"
    order = itertools.count()

    class BoundedProtocol(HttpToolsProtocol):
        """``_part``: what the next byte belongs to. ``_num_pending``: bytes that came and are no piece of a
        body: of a head, of trailers, of the extensions of chunks. A timer runs while the client has to send
        and no answer is awaited."""

        _part: Literal["none", "head", "body"] = "none"
        _num_pending = 0
        _has_body = False
        _is_refused = False
        _timer: asyncio.TimerHandle | None = None
        _idle_since = 0  # a count, since the clock of uvloop has only milliseconds
        _running: RequestResponseCycle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._idle_since = next(order)
            self._start_timer()
            if max_connections and len(self.connections) > max_connections:
                self._make_room()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)
            # uvicorn tells the request that came last; it is an earlier one that runs while others wait
            # behind it.
            running = self._running
            if running is not None and not running.response_complete:
                running.disconnected = True
                running.message_event.set()

        def _start_asgi_task(self, cycle: RequestResponseCycle, app: "ASGI3Application") -> None:
            self._running = cycle
            super()._start_asgi_task(cycle, app)

        def data_received(self, data: bytes) -> None:
            if self._is_refused:
                return
            self._has_body = False
            super().data_received(data)
            if self._part != "none" and not self._has_body:
                self._num_pending += len(data)
                self._check_size(self._num_pending)
            if self._part != "head" and self._is_unused() and self.timeout_keep_alive_task is None:
                self._start_timer()  # a stray line end, or more of such a rest

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._part = "head"
            self._num_pending = 0
            self._start_timer()

        def on_header(self, name: bytes, value: bytes) -> None:
            super().on_header(name, value)
            if len(self.headers) > MAX_HEADERS:
                self._refuse(_too_large(f"{MAX_HEADERS} headers"))

        def on_headers_complete(self) -> None:
            self._stop_timer()
            self._part = "body"
            self._num_pending = 0
            self._check_size(len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers))
            if not self._is_refused:
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._num_pending = 0
            self._has_body = True
            if not self._is_refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            self._part = "none"
            if not self._is_refused:
                super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            self._refuse(ApiError(400, msg))

        def on_response_complete(self) -> None:
            self._idle_since = next(order)
            super().on_response_complete()
            if self._part == "body" and self._is_unused() and not self.transport.is_closing():
                self._unset_keepalive_if_required()
                self._start_timer()  # the rest of a body whose answer is out

        def _make_room(self) -> None:
            """Close the connection that has been without a request for longest, or else this one."""
            idle = [
                other
                for other in self.connections
                if isinstance(other, BoundedProtocol)
                and other is not self
                and other._is_idle
                and not other._is_refused
            ]
            if idle:
                min(idle, key=lambda other: other._idle_since).transport.close()
            elif len(self.connections) <= max_connections + MAX_REFUSED_CONNECTIONS:
                self._refuse(too_many_connections())
            else:
                self.transport.abort()

        @property
        def _is_idle(self) -> bool:
            return self._part == "none" and self._is_unused() and not self.transport.is_closing()

        def _is_unused(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _check_size(self, num_bytes: int) -> None:
            if num_bytes > MAX_HEAD_BYTES:
                self._refuse(_too_large(f"{MAX_HEAD_BYTES} bytes"))

        def _start_timer(self) -> None:
            if read_timeout and self._timer is None:
                self._timer = self.loop.call_later(read_timeout, self._time_out)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _time_out(self) -> None:
            self._timer = None
            if self._part == "head":
                message = f"The head of the request did not arrive within {read_timeout:g} seconds."
                self._refuse(ApiError(408, message, type="timeout_error", code="request_timeout"))
            else:
                self.transport.close()

        def _refuse(self, error: ApiError) -> None:
            """Answer, unless an earlier request still waits for its answer, and close."""
            if self._is_refused or self.transport.is_closing():
                return
            self._is_refused = True
            self._stop_timer()
            if self._is_unused():
                self.transport.write(_raw_response(error))
                if self.transport.can_write_eof():
                    self.transport.write_eof()
                self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)
            else:
                self.transport.close()

    return BoundedProtocol


def _too_large(limit: str) -> ApiError:
    return ApiError(
        431,
        f"The head of the request is larger than the limit of {limit}.",
        code="request_header_fields_too_large",
    )


def _raw_response(error: ApiError) -> bytes:
    body = encode_json(error.body())
    head = (
        f"HTTP/1.1 {error.status} {_PHRASES[error.status]}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *(f"{name}: {value}" for name, value in (error.headers or {}).items()),
    )
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body
