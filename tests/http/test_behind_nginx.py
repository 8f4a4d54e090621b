"""Behind nginx as it comes, buffering and compressing what it may: a stream still arrives token by token, and
a client that leaves is noticed. ``make nginx-test`` brings the program; where it is missing the tests are
skipped, unless GEMSERVE_NEEDS_NGINX is set."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes import BOS, HANG, FakeRunner, fake_engine_factory
from tests.http.live_server import LiveServer, live_server
from tests.ports import free_port

# `/` speaks HTTP/1.0 to the server and closes, as is nginx's default; `/pooled/` keeps connections.
CONFIGURATION = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  gzip on;
  gzip_types *;
  gzip_min_length 0;
  gzip_proxied any;
  upstream pool {{ server 127.0.0.1:{upstream}; keepalive 8; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://127.0.0.1:{upstream}; }}
    location /pooled/ {{
      proxy_pass http://pool/;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $host;
    }}
  }}
}}
"""


@pytest.fixture(scope="module")
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture(scope="module")
def upstream(runner: FakeRunner) -> Iterator[LiveServer]:
    with live_server(fake_engine_factory(runner)) as live:
        yield live


@pytest.fixture(scope="module")
def proxy(upstream: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    program = shutil.which("nginx")
    if program is None:
        assert not os.environ.get("GEMSERVE_NEEDS_NGINX"), "nginx is not on the PATH"
        pytest.skip("nginx is not on the PATH: `make nginx-test` brings it")
    folder = tmp_path_factory.mktemp("nginx")
    port = free_port()
    file = folder / "nginx.conf"
    file.write_text(CONFIGURATION.format(folder=folder, port=port, upstream=upstream.port))
    process = subprocess.Popen([program, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(file)])
    try:
        # Less than the fake model waits to be released.
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            wait_for_answer(client, process, folder / "error.log")
            yield client
    finally:
        process.terminate()
        process.wait(60)


def wait_for_answer(client: httpx.Client, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None, log.read_text()
        try:
            assert client.get("/health").status_code == 200
            return
        except httpx.ConnectError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize("prefix", ["", "/pooled"])
def test_tokens_arrive_while_later_ones_are_not_made_yet(
    proxy: httpx.Client, upstream: LiveServer, runner: FakeRunner, prefix: str
) -> None:
    runner.released.clear()
    body = {"prompt": [BOS, *[HANG] * 4], "max_tokens": 8, "temperature": 0, "stream": True}
    with proxy.stream("POST", f"{prefix}/v1/completions", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        first = [next(lines) for _ in range(3)]
        assert all('"finish_reason":null' in line for line in first)
        assert not runner.released.is_set(), "the fourth token is not made before this"
        runner.released.set()
        rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    upstream.wait_for(upstream.is_idle)


def test_a_client_that_leaves_is_noticed(
    proxy: httpx.Client, upstream: LiveServer, runner: FakeRunner
) -> None:
    runner.released.clear()
    before = upstream.outcomes("client_disconnect")
    body = {"prompt": [BOS, *[HANG] * 4], "max_tokens": 400, "temperature": 0, "stream": True}
    with proxy.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    runner.released.set()
    upstream.wait_for(lambda: upstream.outcomes("client_disconnect") == before + 1)
    upstream.wait_for(upstream.is_idle)


def test_answers_and_errors_pass_unchanged(proxy: httpx.Client, upstream: LiveServer) -> None:
    for path, body, status in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 3, "temperature": 0}, 200),
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}, 400),
        ("/v1/nothing", {}, 404),
    ):
        through, direct = proxy.post(path, json=body), upstream.post(path, body)
        assert through.status_code == direct.status_code == status
        assert through.headers["content-type"] == direct.headers["content-type"]
        if status == 200:
            assert through.json()["choices"] == direct.json()["choices"]
        else:
            assert through.json() == direct.json()
