"""One exchange of the corpus: the bytes of a request, and how its answer is read and compared. The builders
at the end are what the areas write their lists with."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

JSON_HEADERS = {"host": "localhost", "content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class Exchange:
    """``name`` is unique among the exchanges of one area on one server.

    ``num_answers``: how many answers are read from the connection, of which each exchange has one of its own.
    ``listener``: the port of the API, or that of the metrics.
    ``is_interleaved``: a stream of several choices, whose events are compared choice by choice: which of two
    choices is told of first depends on when each of them came to the engine.
    ``group``: neighbours of the same group are sent at the same time.
    ``beside``: this stream runs while the answer is made. Neighbours of the same stream are sent one after
    the other.
    """

    name: str
    request: bytes
    num_answers: int = 1
    listener: Literal["api", "metrics"] = "api"
    is_interleaved: bool = False
    group: str | None = None
    beside: bytes | None = None

    @property
    def method(self) -> str:
        return self.request.partition(b" ")[0].decode("latin-1")

    def streamed(self) -> "Exchange":
        """The same request of JSON as a stream."""
        head, _, body = self.request.partition(b"\r\n\r\n")
        line, *lines = head.decode().split("\r\n")
        headers = dict(header.split(": ", 1) for header in lines)
        method, path, _ = line.split(" ")
        request = request_bytes(method, path, {**json.loads(body), "stream": True}, headers)
        return replace(self, name=f"{self.name}, streamed", request=request)


def request_bytes(
    method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> bytes:
    """A request of HTTP/1.1. A ``body`` other than bytes is written as JSON, in which ASCII escapes may spell
    lone surrogates; None: no body."""
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    default = {"host": "localhost"} if body is None else JSON_HEADERS
    fields = {**default, **(headers or {})}
    if body is not None:
        fields["content-length"] = str(len(content))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1") + content


def get(
    path: str, name: str | None = None, headers: Mapping[str, str] | None = None, **options: Any
) -> Exchange:
    return Exchange(name or path, request_bytes("GET", path, headers=headers), **options)


def post(
    path: str, name: str, body: Any, headers: Mapping[str, str] | None = None, **options: Any
) -> Exchange:
    return Exchange(name, request_bytes("POST", path, body, headers), **options)


def both_ways(*exchanges: Exchange) -> list[Exchange]:
    """Each of them in one piece, then streamed."""
    return [way for exchange in exchanges for way in (exchange, exchange.streamed())]
