"""A tiny OpenAI-style server for the commands that talk to one: fixed answers, streamed completions, a log of
what was asked."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class FakeServer:
    ready: bool = True
    fail_with: int | None = None  # status of every completion
    break_stream: bool = False  # end streams before [DONE]
    # has the counters of a gemserve: a millisecond in steps per request, a quarter of it scheduling
    tells_engine: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""


def _handler(state: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            """Quiet."""

        def answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/health/live":
                self.answer(200, {"status": "alive"})
            elif self.path == "/health/ready":
                self.answer(
                    200 if state.ready else 503,
                    {"status": "ready" if state.ready else "loading", "phase": "weights"},
                )
            elif self.path == "/v1/models":
                self.answer(200, {"object": "list", "data": [{"id": "fake-model", "object": "model"}]})
            elif self.path == "/metrics" and state.tells_engine:
                self.metrics()
            else:
                self.answer(404, {})

        def metrics(self) -> None:
            busy = 5 + len(state.bodies) / 1000
            lines = [
                f"gemserve_engine_busy_seconds_total {busy}",
                f'gemserve_engine_host_seconds_total{{stage="schedule"}} {busy / 4}',
            ]
            data = "\n".join(lines).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.bodies.append(body)
            if state.fail_with is not None:
                self.answer(state.fail_with, {"error": {"message": "no room"}})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for _ in range(body["max_tokens"]):
                self.event(
                    json.dumps({"choices": [{"index": 0, "text": "x", "finish_reason": None}], "usage": None})
                )
            if not state.break_stream:
                self.event(json.dumps({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}))
                self.event("[DONE]")
            self.close_connection = True

        def event(self, data: str) -> None:
            self.wfile.write(f"data: {data}\n\n".encode())

    return Handler


@contextmanager
def fake_server(**options: Any) -> Iterator[FakeServer]:
    state = FakeServer(**options)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(state))
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
