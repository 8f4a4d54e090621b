"""Input that is huge, slow or never ends costs little: it is refused early, and the server goes on
answering."""

import gc
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from server.api.generation.validation import MAX_BODY_BYTES, MAX_NESTING
from server.http.protocol import MAX_HEAD_BYTES, MAX_HEADERS
from tests.http.live_server import LiveServer, error_of, live_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
READ_TIMEOUT = 0.5


@pytest.fixture(scope="module")
def impatient() -> Iterator[LiveServer]:
    with live_server(read_timeout=READ_TIMEOUT) as live:
        yield live


def exchange(server: LiveServer, *pieces: bytes, pause: float = 0.0) -> bytes:
    """What the server answers to the pieces until it closes the connection, which it must do soon."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause)
        except OSError:
            pass  # closed in the middle, which is what it may do
        answer = b""
        try:
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionError:
            pass
    server.check_alive()
    return answer


@pytest.mark.parametrize(
    "head",
    [
        HEAD + b"x-a: " + b"a" * (1 << 20) + b"\r\n\r\n",
        HEAD + b"".join(b"x-%d: a\r\n" % i for i in range(10_000)) + b"\r\n",
        HEAD + b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n",
        HEAD + b"x-a: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /" + b"a" * (1 << 20),
    ],
    ids=[
        "a header of a megabyte",
        "10000 headers",
        "too many",
        "one too large",
        "a long line",
        "an endless line",
    ],
)
def test_a_huge_head_is_a_431(server: LiveServer, head: bytes) -> None:
    answer = exchange(server, head)
    assert answer.startswith(b"HTTP/1.1 431 "), answer[:200]
    assert b'"code":"request_header_fields_too_large"' in answer


def test_a_head_within_the_limits_is_served(server: LiveServer) -> None:
    headers = {f"x-{i}": "a" * 400 for i in range(120)}
    assert server.client.get("/health", headers=headers).status_code == 200
    assert server.client.get("/health", params={"a": "b" * 20_000}).status_code == 200


@pytest.mark.parametrize(
    "junk", [b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"\xff" * 1000, b"G E T / HTTP/1.1\r\n\r\n"]
)
def test_what_is_not_http_is_a_400(server: LiveServer, junk: bytes) -> None:
    assert exchange(server, junk).startswith(b"HTTP/1.1 400 ")


def test_trailers_and_chunk_extensions_cannot_grow_for_ever(server: LiveServer) -> None:
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    flood = [b"a" * 65536] * 64
    exchange(server, chunked + b"2\r\n{}\r\n0\r\nx-trailer: ", *flood)
    exchange(server, chunked + b"2;a=", *flood)


def test_a_head_that_drips_is_a_408(impatient: LiveServer) -> None:
    answer = exchange(impatient, *(HEAD[i : i + 1] for i in range(12)), pause=0.1)
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_body_that_drips_is_a_408(impatient: LiveServer) -> None:
    before = impatient.rejections("invalid")
    pieces = [HEAD + b"content-length: 1000\r\n\r\n", *[b" "] * 12]
    answer = exchange(impatient, *pieces, pause=0.1)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer
    assert impatient.rejections("invalid") == before + 1


@pytest.mark.parametrize(
    "sent", [[b""], [b"\r\n"], [b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b"\r\n"]]
)
def test_a_connection_that_asks_nothing_is_closed(impatient: LiveServer, sent: list[bytes]) -> None:
    exchange(impatient, *sent, pause=0.1)  # returns when the connection is closed


def test_the_rest_of_a_refused_body_is_not_read_for_ever(impatient: LiveServer) -> None:
    pieces = [HEAD.replace(b"json", b"text") + b"content-length: 100000\r\n\r\n", *[b" "] * 12]
    assert exchange(impatient, *pieces, pause=0.1).startswith(b"HTTP/1.1 400 ")


def test_two_hundred_idle_connections_harm_nobody() -> None:
    with live_server(read_timeout=2) as server:
        connections = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(200)]
        for i, connection in enumerate(connections):
            connection.sendall(HEAD[: i % 40])
        server.check_alive()
        for connection in connections:
            while connection.recv(4096):
                pass
            connection.close()
        server.check_alive()


def test_a_body_over_the_limit_is_refused_before_it_is_read(server: LiveServer) -> None:
    answer = exchange(server, HEAD + b"content-length: 500000000\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("head", "size", "status"),
    [
        (HEAD, MAX_BODY_BYTES + (1 << 20), 413),
        (HEAD.replace(b"json", b"text"), 1 << 22, 400),
        (b"GET /nope HTTP/1.1\r\nhost: localhost\r\n", 1 << 22, 404),
    ],
    ids=["too large", "another type", "no such route"],
)
def test_a_client_that_sends_on_still_gets_its_answer(
    server: LiveServer, head: bytes, size: int, status: int
) -> None:
    """Not a reset of the connection, which is what comes of closing it under a sender."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % size + b" " * size)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert set(json.loads(answer.partition(b"\r\n\r\n")[2])) == {"error"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a" * 10_000_000}),
        (COMPLETIONS, {"prompt": ["a", "b" * 100_000], "max_tokens": 4, "echo": True}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 3_000_000}]}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 2_000}] * 1001, "max_tokens": 4}),
    ],
    ids=["completion", "one of two", "chat", "many messages"],
)
def test_a_hopeless_prompt_is_refused_without_encoding_it(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    encoded: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(server.app.state.server.loaded.tokenizer, "encode_plain", encoded.append)
        response = server.post(path, body)
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert (
        "This model's maximum context length is 512 tokens. However, you requested at least "
        in error["message"]
    )
    assert encoded == []
    server.check_alive()


def test_memory_does_not_grow_with_what_is_refused(server: LiveServer) -> None:
    json_type = {"content-type": "application/json"}
    huge = json.dumps({"prompt": "a" * (MAX_BODY_BYTES - 100)}).encode()
    header = HEAD + b"x-a: " + b"a" * (4 << 20)

    def attack() -> None:
        exchange(server, header)
        server.client.post(COMPLETIONS, content=huge, headers=json_type)
        server.post(COMPLETIONS, {"prompt": ["a"] * 100_000})
        server.client.post(COMPLETIONS, content=(b" " * 65536 for _ in range(400)), headers=json_type)

    def memory() -> int:
        gc.collect()
        return psutil.Process().memory_info().rss

    # what the allocator keeps for the next time; the client's part of it is in the same process
    for _ in range(4):
        attack()
    before = memory()
    for _ in range(10):
        attack()
    # Of 500 MB that were sent, twice the largest body, and as much for the client, which is in the same
    # process.
    assert memory() - before < 4 * MAX_BODY_BYTES


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "n": 10**6},
        {"prompt": "a", "n": 10**18},
        {"prompt": "a", "best_of": 10**6},
        {"prompt": ["a"] * 100_000},
        {"prompt": [[9]] * 64, "n": 64},
        {"prompt": ["a"] * 64, "n": 64},
    ],
    ids=["n", "huge n", "best_of", "prompts", "ids x n", "texts x n"],
)
def test_a_fan_out_is_refused_at_once(server: LiveServer, body: dict[str, Any]) -> None:
    content = json.dumps(body)
    used = time.process_time()
    response = server.client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
    assert time.process_time() - used < 1, "without the limits it would be minutes"
    assert response.status_code == 400
    server.check_alive()


def nested(levels: int) -> str:
    """A body whose deepest value is inside so many lists and objects."""
    return (
        '{"prompt": "a", "max_tokens": 1, "metadata": {"a": ' + "[" * (levels - 2) + "]" * (levels - 2) + "}}"
    )


@pytest.mark.parametrize(
    ("levels", "status"), [(MAX_NESTING, 200), (MAX_NESTING + 1, 400), (5_000, 400), (1_000_000, 400)]
)
def test_nesting_is_limited(server: LiveServer, levels: int, status: int) -> None:
    response = server.client.post(
        COMPLETIONS, content=nested(levels), headers={"content-type": "application/json"}
    )
    assert response.status_code == status
    if status == 400:
        assert "nested too deeply" in error_of(response)["message"]
    server.check_alive()


def test_many_flat_lists_are_not_deep(server: LiveServer) -> None:
    assert server.post(COMPLETIONS, {"prompt": [[9]] * 200, "max_tokens": 1}).status_code == 200


TEXT, BLOCK = {"type": "input_text", "text": ""}, {"type": "text", "text": ""}
CALLED = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USED = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULTS = {"type": "tool_result", "tool_use_id": "a", "content": [BLOCK] * 4097}
PREDICATE = {"type": "predicate", "instructions": "a"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [BLOCK] * 4097}] * 4}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALLED] * 4096}] * 5}),
        ("/tokenize", {"messages": [{"role": "user", "content": [BLOCK] * 16385}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [TEXT] * 4097}] * 4}),
        (
            "/v1/responses",
            {"input": [{"type": "function_call_output", "call_id": "a", "output": [TEXT] * 4097}] * 4},
        ),
        (
            "/v1/decisions",
            {"input": [{"role": "user", "content": [TEXT] * 4097}] * 4, "questions": [PREDICATE]},
        ),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [RESULTS] * 4}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "assistant", "content": [USED] * 4096}] * 5}),
    ],
)
def test_parts_are_counted_over_the_whole_request(
    server: LiveServer, path: str, body: dict[str, Any]
) -> None:
    """Thousands of messages with thousands of parts each, all without text, would hold up the event loop for
    seconds."""
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    assert "at most 16384 parts and calls" in response.json()["error"]["message"]
    server.check_alive()
