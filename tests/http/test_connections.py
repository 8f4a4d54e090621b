"""Connections are bounded: idle ones make room for new ones, and what is beyond them is refused; idle ones
live longer than those in the pools of clients."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from server.settings.settings import Settings
from tests.http.live_server import LiveServer, live_server

LIMIT = 8
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
HALF = b"POST /v1/completions HTTP/1.1\r\nhost: loc"


@pytest.fixture(scope="module")
def small() -> Iterator[LiveServer]:
    with live_server(max_connections=LIMIT, read_timeout=300) as live:
        live.client.close()  # its connection would count
        yield live


def connect(server: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def answer(connection: socket.socket) -> bytes:
    """The whole of a short answer."""
    received = b""
    while b"}" not in received:
        piece = connection.recv(4096)
        if not piece:
            break
        received += piece
    return received


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_the_connection_without_a_request_for_longest_makes_room(small: LiveServer) -> None:
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(small)) for _ in range(LIMIT)]
        for connection in connections[1:]:  # the first one never asks
            connection.sendall(GET)
            assert answer(connection).startswith(b"HTTP/1.1 200")
        connections[1].sendall(GET)  # so that now it is the second that is idle for longest
        assert answer(connections[1]).startswith(b"HTTP/1.1 200")
        for left_over in (connections[0], connections[2]):
            late = stack.enter_context(connect(small))
            late.sendall(GET)
            assert answer(late).startswith(b"HTTP/1.1 200")
            assert is_closed(left_over)
        connections[1].sendall(GET)
        assert answer(connections[1]).startswith(b"HTTP/1.1 200")


def test_where_none_is_idle_a_new_one_is_refused_with_a_time_to_come_back(small: LiveServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(LIMIT):
            stack.enter_context(connect(small)).sendall(HALF)
        small.wait_for(lambda: len(busy(small)) == LIMIT)
        with connect(small) as late:
            late.sendall(GET)
            refusal = answer(late)
            assert refusal.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: " in refusal
            assert b'"code":"too_many_connections"' in refusal
            assert is_closed(late)
    small.wait_for(lambda: not busy(small))
    with connect(small) as again:
        again.sendall(GET)
        assert answer(again).startswith(b"HTTP/1.1 200")


def test_a_flood_of_connections_is_closed(small: LiveServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(LIMIT):
            stack.enter_context(connect(small)).sendall(HALF)
        small.wait_for(lambda: len(busy(small)) == LIMIT)
        flood = [stack.enter_context(connect(small)) for _ in range(20 * LIMIT)]
        for connection in flood:
            while not is_closed(connection):
                pass


def busy(server: LiveServer) -> list[object]:
    """Connections that have begun to send a request."""
    return [
        connection
        for connection in list(server.connections)
        if getattr(connection, "_part", "none") != "none"
    ]


def test_idle_connections_outlive_the_pools_of_clients() -> None:
    """Common clients keep idle connections for up to a minute; one that the server closes first meets a
    request half-way."""
    assert Settings().keep_alive_timeout == 75
    with live_server(keep_alive_timeout=1, read_timeout=300) as short, connect(short) as connection:
        connection.sendall(GET)
        assert answer(connection).startswith(b"HTTP/1.1 200")
        assert is_closed(connection), "after a second without a request"
    with live_server(keep_alive_timeout=300, read_timeout=1) as long, connect(long) as connection:
        for _ in range(2):
            connection.sendall(GET)
            assert answer(connection).startswith(b"HTTP/1.1 200")
            # more than the time that a head may take, which does not count in between
            connection.settimeout(2)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            connection.settimeout(60)
