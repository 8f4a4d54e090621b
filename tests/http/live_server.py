"""The real server on a free port, in a thread, with a fake model: what tests talk to over real sockets."""

import contextlib
import functools
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from server.app import create_app
from server.http.protocol import http_protocol
from server.loading.load import LoadedEngine
from server.observability.tracing import RequestTracer
from server.settings.settings import Settings
from tests.fakes import fake_engine_factory
from tests.http.openapi_contract import check_answer

LIVE_BODY = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}


class LiveServer:
    def __init__(self, app: FastAPI, port: int, connections: Collection[object] = ()) -> None:
        self.app = app
        self.port = port
        self.connections = connections  # open ones, of the server itself
        self.url = f"http://127.0.0.1:{port}"
        # Every answer that a test gets is one that /openapi.json allows.
        check_head = functools.partial(check_answer, reads_streams=False)
        self.client = httpx.Client(base_url=self.url, timeout=60, event_hooks={"response": [check_head]})
        self._live_text: str | None = None

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        response = self.client.post(path, json=body, **options)
        check_answer(response)
        return response

    @contextlib.contextmanager
    def open_request(self, body: dict[str, Any], *headers: str) -> Iterator[socket.socket]:
        """A completion on a connection of its own, whose answer nobody has read yet. Leaving the block closes
        it."""
        payload = json.dumps(body).encode()
        lines = [
            "POST /v1/completions HTTP/1.1",
            "host: localhost",
            "content-type: application/json",
            *headers,
        ]
        lines += [f"content-length: {len(payload)}", "", ""]
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall("\r\n".join(lines).encode() + payload)
            yield connection

    def outcomes(self, outcome: str) -> float:
        """Completions that ended so, streamed or not."""
        return sum(
            self.metric("requests_total", endpoint="completions", stream=stream, outcome=outcome)
            for stream in ("true", "false")
        )

    def rejections(self, reason: str) -> float:
        return self.metric("request_rejections_total", endpoint="completions", reason=reason)

    def complete(self, **body: Any) -> dict[str, Any]:
        """An unstreamed completion that must succeed."""
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        result: dict[str, Any] = response.json()
        return result

    def chat(self, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        result: dict[str, Any] = response.json()
        return result

    def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error of a request that must be refused, in OpenAI's shape; the server is unharmed
        afterwards."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        error = error_of(response)
        self.check_alive()
        return error

    def check_alive(self) -> None:
        text = self.complete(**LIVE_BODY)["choices"][0]["text"]
        self._live_text = self._live_text or text
        assert text == self._live_text
        assert self.client.get("/health").status_code == 200

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample, 0 if there is none."""
        for line in self.client.get("/metrics").text.splitlines():
            match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            if match and match[1] == f"gemserve_{name}":
                found = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
                if labels.items() <= found.items():
                    return float(match[3])
        return 0.0

    def wait_for(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "condition not met in time"
            time.sleep(0.02)

    def is_idle(self) -> bool:
        return self.metric("requests_running") == 0 and self.metric("requests_waiting") == 0


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}, body
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert len(response.content) < 4000
    return error


@contextlib.contextmanager
def live_server(
    factory: Callable[[Settings, Callable[[str], None]], LoadedEngine] | None = None,
    *,
    wait: bool = True,
    deaths: list[BaseException] | None = None,
    tracer: RequestTracer | None = None,
    **settings: Any,
) -> Iterator[LiveServer]:
    """``deaths`` collects what the application reports to the command line."""
    checked = Settings(**settings)
    app = create_app(checked, engine_factory=factory or fake_engine_factory(), tracer=tracer)
    if deaths is not None:
        app.state.on_engine_death = deaths.append
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        log_level="warning",
        http=http_protocol(checked.read_timeout, checked.max_connections),
        timeout_keep_alive=checked.keep_alive_timeout,
        ws="none",
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    live = LiveServer(app, server.servers[0].sockets[0].getsockname()[1], server.server_state.connections)
    try:
        if wait:
            live.wait_for(lambda: live.client.get("/health/ready").status_code == 200)
        yield live
    finally:
        live.client.close()
        server.should_exit = True
        thread.join(timeout=60)
        assert not thread.is_alive()
