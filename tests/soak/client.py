"""A small HTTP client that can leave at any moment, gently or by a reset. Keeps whatever it received."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEADLINE_SECONDS = 120  # for one request, queue included; a request that hangs fails the soak
EVENT = b"data: "


@dataclass(frozen=True, slots=True)
class Leave:
    """When a client closes its connection: after so many events, or after so many seconds where that comes
    first."""

    after_events: int
    after_seconds: float
    reset: bool


@dataclass(frozen=True, slots=True)
class Reply:
    """``left``: closed by the client before the end, so that the body may be cut anywhere."""

    status: int | None
    body: bytes
    left: bool
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.body)
        return value

    @property
    def events(self) -> list[dict[str, Any]]:
        """The whole events of a stream, without the final mark."""
        pieces = self.body.split(b"\n\n")[:-1]
        return [json.loads(piece.removeprefix(EVENT)) for piece in pieces if piece.startswith(EVENT + b"{")]


async def send(port: int, path: str, body: bytes, request_id: str, leave: Leave | None) -> Reply:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-request-id: {request_id}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    received = bytearray()
    ended = False
    try:
        writer.write(head.encode() + body)
        async with asyncio.timeout(DEADLINE_SECONDS):
            ended = await _receive(reader, received, leave)
    finally:
        if leave is not None and leave.reset:
            writer.transport.abort()
        else:
            writer.close()
    return _reply(bytes(received), left=not ended)


async def _receive(reader: asyncio.StreamReader, received: bytearray, leave: Leave | None) -> bool:
    """Read to the end, or to where the client leaves. True: to the end."""
    until = None if leave is None else asyncio.get_running_loop().time() + leave.after_seconds
    while True:
        try:
            async with asyncio.timeout_at(until):
                data = await reader.read(65536)
        except TimeoutError:
            if until is None or asyncio.get_running_loop().time() < until:
                raise
            return False
        if not data:
            return True
        received += data
        if leave is not None and received.count(EVENT) > leave.after_events:
            return False


def _reply(received: bytes, left: bool) -> Reply:
    head, separator, body = received.partition(b"\r\n\r\n")
    if not separator:
        assert left, "the server closed the connection without an answer"
        return Reply(None, b"", left)
    lines = head.decode("latin-1").lower().split("\r\n")
    if "transfer-encoding: chunked" in lines:
        body, complete = _dechunk(body)
        left = not complete and left
        assert complete or left, "the server closed the connection inside an answer"
    headers = {name: value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    return Reply(int(lines[0].split()[1]), body, left, headers)


def _dechunk(body: bytes) -> tuple[bytes, bool]:
    """The content so far, and whether it is complete."""
    content = bytearray()
    while True:
        size_text, separator, rest = body.partition(b"\r\n")
        if not separator:
            return bytes(content), False
        size = int(size_text, 16)
        if size == 0:
            return bytes(content), True
        content += rest[:size]
        body = rest[size + 2 :]
