"""What the server relies on inside uvicorn, beyond its documented interface, all in one place.

A new version of uvicorn is taken in three steps: its number in constraints.txt and ``VERSIONS``, these tests,
and a look at the source of each name below, since a test sees that a name is there, but not what it means.
"""

import ast
import inspect
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.http.protocol import http_protocol

ROOT = Path(__file__).parents[3]
VERSIONS = ("0.54.0",)  # that all tests have run with

# Of one connection (server/http/protocol.py): callbacks of asyncio and httptools, and their state.
PROTOCOL = {
    "connection_made": "begins a connection; adds it to connections",
    "connection_lost": "tells the newest request alone",
    "data_received": "feeds the parser; what it raises becomes send_400_response",
    "on_message_begin": "begins a request",
    "on_header": "appends to headers",
    "on_headers_complete": "begins the application's task, or queues the request",
    "on_body": "hands a piece on",
    "on_message_complete": "ends the body",
    "on_response_complete": "begins the next queued request, or the keep-alive timer",
    "send_400_response": "answers what is no HTTP, and closes",
    "_start_asgi_task": "the only place where the application's task begins",
    "_unset_keepalive_if_required": "stops the keep-alive timer",
    "connections": "all open connections of the server",
    "cycle": "the request that came last, None before the first",
    "headers": "of the head that is being read",
    "url": "of the head that is being read",
    "loop": "the event loop",
    "timeout_keep_alive_task": "None where no keep-alive timer runs",
    "transport": "of the connection",
}
# Of one request (server/http/protocol.py).
CYCLE = {
    "response_complete": "the answer is out",
    "disconnected": "makes receive() tell of http.disconnect",
    "message_event": "wakes receive()",
}
# Of the process (server/cli/serving.py, server/http/metrics_listener.py).
SERVER = {
    "startup": "opens the sockets; ends the process when the lifespan fails",
    "shutdown": "closes sockets and idle connections, waits for the rest",
    "handle_exit": "the handler of SIGINT and SIGTERM, set by serve()",
    "_captured_signals": "raised again once serve() has ended",
    "should_exit": "looked at ten times a second",
    "force_exit": "ends the waiting of shutdown()",
    "lifespan": "made by _serve(); startup() alone needs it set before",
}


def names_of(cls: type) -> set[str]:
    """Attributes of a class and of its instances, as far as its source assigns them."""
    sources = [inspect.getsource(base) for base in cls.__mro__ if base.__module__.startswith("uvicorn")]
    assigned = re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", "\n".join(sources))
    return set(dir(cls)) | set(assigned)


def borrowed(path: str, class_name: str, base: type) -> set[str]:
    """Names of the base that the class in this file replaces, reads or calls."""
    tree = ast.parse((ROOT / path).read_text())
    (body,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == class_name)
    replaced = {node.name for node in body.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    used = {
        node.attr
        for node in ast.walk(body)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "other", "super()")
    }
    return {name for name in (replaced | used) & names_of(base) if not name.startswith("__")}


def test_the_installed_version_is_one_of_those_that_were_looked_at() -> None:
    pinned = re.findall(r"^uvicorn==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned == [VERSIONS[-1]]
    assert version("uvicorn") in VERSIONS


@pytest.mark.parametrize(
    ("cls", "names"), [(HttpToolsProtocol, PROTOCOL), (RequestResponseCycle, CYCLE), (uvicorn.Server, SERVER)]
)
def test_uvicorn_has_every_name(cls: type, names: dict[str, str]) -> None:
    assert names.keys() <= names_of(cls)


def test_the_list_is_complete_for_a_connection() -> None:
    assert borrowed("server/http/protocol.py", "BoundedProtocol", HttpToolsProtocol) == PROTOCOL.keys()


def test_the_list_is_complete_for_a_request() -> None:
    source = (ROOT / "server/http/protocol.py").read_text()
    assert set(re.findall(r"\b(?:cycle|running)\.(\w+)", source)) == CYCLE.keys()


def test_the_list_is_complete_for_the_process() -> None:
    listener = (ROOT / "server/http/metrics_listener.py").read_text()
    used = borrowed("server/cli/serving.py", "Server", uvicorn.Server)
    assert used | set(re.findall(r"self\._server\.(\w+)", listener)) == SERVER.keys()


def test_a_protocol_is_what_uvicorn_looks_for() -> None:
    protocol = http_protocol(1.0)
    assert isinstance(protocol, type)
    assert issubclass(protocol, HttpToolsProtocol)
