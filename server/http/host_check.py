"""Guards a server on a loopback address against pages that rebind a name of their own to 127.0.0.1: their
requests carry that name in the Host header. Only loopback names and addresses, and configured names, are let
through. Elsewhere every Host is."""

import ipaddress
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import host_not_allowed
from server.http.json_response import error_response
from server.http.middleware import Refusals, header_values


def is_loopback(host: str) -> bool:
    """``localhost``, a name under it, or a loopback address; no name is looked up."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_of(header: str) -> str:
    """The name or address in a Host header, in lower case, without the port and the brackets of IPv6."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.count(":") == 1 else header


class HostMiddleware:
    """``host``: the address that the server is bound to. Without ``refusals`` what is refused is answered and
    no more."""

    def __init__(
        self, app: ASGIApp, host: str, allowed_hosts: Iterable[str], refusals: Refusals | None
    ) -> None:
        self._app = app
        self._checks = is_loopback(host.lower())
        self._allowed = frozenset(host_of(name) for name in allowed_hosts)
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._checks:
            await self._app(scope, receive, send)
            return
        # A request of HTTP/1.0 may have none: no browser sends such a one.
        refused = [
            value for value in header_values(scope, b"host") if not self._is_allowed(value.decode("latin-1"))
        ]
        if not refused:
            await self._app(scope, receive, send)
            return
        error = host_not_allowed(refused[0].decode("latin-1"))
        if self._refusals is None:
            await error_response(error)(scope, receive, send)
        else:
            await self._refusals.answer(error, scope, receive, send)

    def _is_allowed(self, header: str) -> bool:
        host = host_of(header)
        return is_loopback(host) or host in self._allowed
