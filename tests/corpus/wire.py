"""Sends requests over plain sockets and reads answers as they are on the wire: every header in its order and
spelling, the body without the framing of its chunks."""

import contextlib
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader

from tests.corpus.exchange import Exchange

TIMEOUT_SECONDS = 300.0
CLOSED = "(the connection was closed)"
Ports = Mapping[str, int]


class WireError(Exception):
    """An answer that is no sound HTTP, or none at all."""


@dataclass(frozen=True, slots=True)
class Answer:
    status_line: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str:
        """The value of a header, empty where there is none."""
        return next((value for key, value in self.headers if key.lower() == name), "")

    @property
    def status(self) -> int:
        return int(self.status_line.split(" ")[1])


def exchange_answers(exchange: Exchange, ports: Ports) -> list[Answer]:
    """Send the request on a connection of its own and read its answers. Raises WireError."""
    with _connection(ports[exchange.listener]) as connection, connection.makefile("rb") as stream:
        try:
            connection.sendall(exchange.request)
            return [read_answer(stream, exchange.method) for _ in range(exchange.num_answers)]
        except (OSError, WireError) as error:
            raise WireError(f"no answer to {exchange.name!r}: {error}") from error


@contextlib.contextmanager
def running_stream(request: bytes, ports: Ports) -> Iterator[None]:
    """A stream that has begun; nobody reads on, and the connection is closed at the end of the block."""
    with _connection(ports["api"]) as connection, connection.makefile("rb") as stream:
        connection.sendall(request)
        status_line, headers = _read_head(stream)
        if "text/event-stream" not in dict(headers).get("content-type", ""):
            raise WireError(f"the stream beside the others did not begin: {status_line}")
        yield


def _connection(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_SECONDS)


def read_answer(stream: BufferedReader, method: str) -> Answer:
    """The next answer on a connection."""
    status_line, headers = _read_head(stream)
    if status_line == CLOSED:
        return Answer(status_line, (), b"")
    answer = Answer(status_line, tuple(headers), b"")
    if answer.status < 200 or answer.status in (204, 304) or method == "HEAD":
        return answer
    if answer.header("transfer-encoding") == "chunked":
        body = b"".join(_chunks(stream))
    elif length := answer.header("content-length"):
        body = _read_exactly(stream, int(length))
    else:
        body = stream.read()
    return Answer(status_line, tuple(headers), body)


def _read_head(stream: BufferedReader) -> tuple[str, list[tuple[str, str]]]:
    """(status line, headers); CLOSED where the connection ended in front of it."""
    if not stream.peek(1):
        return CLOSED, []
    status_line = _read_line(stream)
    headers = []
    while line := _read_line(stream):
        name, separator, value = line.partition(": ")
        if not separator:
            raise WireError(f"a header without a value: {line!r}")
        headers.append((name, value))
    return status_line, headers


def _chunks(stream: BufferedReader) -> Iterator[bytes]:
    while size := int(_read_line(stream), 16):
        yield _read_exactly(stream, size)
        if _read_line(stream):
            raise WireError("a chunk is longer than it says")
    if _read_line(stream):
        raise WireError("a trailer that nobody asked for")


def _read_line(stream: BufferedReader) -> str:
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise WireError(f"the connection ended in {line!r}")
    return line[:-2].decode("latin-1")


def _read_exactly(stream: BufferedReader, num_bytes: int) -> bytes:
    found = stream.read(num_bytes)
    if len(found) < num_bytes:
        raise WireError(f"the connection ended {num_bytes - len(found)} bytes too early")
    return found
