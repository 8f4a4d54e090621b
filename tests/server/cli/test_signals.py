"""Signals end the process of ``gemserve serve`` in order, whatever it does just then: never a silent cut, no
wait without end, and the port is free afterwards."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import BOS, HANG
from tests.server.cli.processes import ROOT, wait_for_lines
from tests.server.cli.serve_process import start, wait_until_caught, wait_until_ready
from tests.tiny import write_tiny_folder

LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 3000, "stream": True}
# Far more than an end takes, and far less than what must not be waited for.
SOON = 60


def ended(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=SOON)
    assert process.returncode is not None
    return process.returncode


@pytest.mark.parametrize("moment", ["caught", "terms"])
def test_in_the_first_seconds_of_a_start(moment: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "server", "serve", str(write_tiny_folder(tmp_path)), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        if moment == "caught":
            wait_until_caught(process, signal.SIGTERM)
        else:
            wait_for_lines(process, "Gemma Terms of Use")  # torch and the model come next
        process.send_signal(signal.SIGTERM)
        assert ended(process) == 0


@pytest.mark.parametrize("behaviour", ["endless", "native"])
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_while_loading(behaviour: str, sent: signal.Signals, code: int) -> None:
    with start(behaviour) as process:
        lines = wait_for_lines(process, "loading now")
        assert any("Gemma Terms of Use" in line for line in lines)
        process.send_signal(sent)
        assert ended(process) == code, "loading never ends, and nothing may wait for it"


def test_while_idle_with_a_connection_open_and_the_port_is_free_at_once() -> None:
    port = 0
    for sent, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)):
        with start("fake_model", port=port) as process:
            port = wait_until_ready(process)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
                assert client.get("/health").status_code == 200
                process.send_signal(sent)
                assert ended(process) == code
                with pytest.raises(httpx.TransportError):
                    client.get("/health")


def open_stream(port: int) -> socket.socket:
    """A long stream that has begun; what follows its head is not read."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=SOON)
    body = json.dumps(LONG).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}"
    )
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    assert connection.recv(1) == b"H"
    return connection


def test_new_requests_are_refused_from_the_signal_on() -> None:
    """Also before the drain has begun, which is up to a tenth of a second later, and here not before it is
    told to."""
    with start("late_shutdown") as process:
        port = wait_until_ready(process)
        url = f"http://127.0.0.1:{port}/v1/completions"
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SOON) as client:
            assert client.get("/health/ready").status_code == 200
            with httpx.stream("POST", url, json={**LONG, "max_tokens": 100}, timeout=SOON) as response:
                chunks = response.iter_text()
                next(chunks)
                process.send_signal(signal.SIGTERM)
                wait_for_lines(process, "signal handled")
                short = {"prompt": "a", "max_tokens": 1}
                for refused in (
                    client.post("/v1/completions", json=short),
                    httpx.post(url, json=short, timeout=SOON),
                ):
                    assert refused.status_code == 503, refused.text
                    assert refused.json()["error"]["code"] == "shutting_down"
                ready = client.get("/health/ready")
                assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
                assert client.get("/health/live").status_code == 200
                process.send_signal(signal.SIGUSR1)
                events = "".join(chunks).split("\n\n")
            assert ended(process) == 0
    assert '"finish_reason":"length"' in events[-3]


@pytest.mark.parametrize(
    ("shutdown_timeout", "max_tokens", "ending"),
    [(30, 100, '"finish_reason":"length"'), (0.2, LONG["max_tokens"], '"code":"shutting_down"')],
)
def test_running_streams_finish_or_are_told(shutdown_timeout: float, max_tokens: int, ending: str) -> None:
    with start("fake_model", shutdown_timeout) as process:
        port = wait_until_ready(process)
        body = {**LONG, "max_tokens": max_tokens}
        with httpx.stream(
            "POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=SOON
        ) as response:
            chunks = response.iter_text()
            next(chunks)
            process.send_signal(signal.SIGTERM)
            events = "".join(chunks).split("\n\n")
        assert ended(process) == 0
    assert events[-2:] == ["data: [DONE]", ""]
    assert ending in events[-3]


def test_running_and_queued_requests_and_a_client_that_does_not_read() -> None:
    """Ten requests on eight places, long ones all, with a second's grace: those that run get an error event,
    those that wait a 503; one client never looks at its answer."""
    answers: list[httpx.Response] = []
    with start("fake_model", shutdown_timeout=1) as process, contextlib.ExitStack() as stack:
        port = wait_until_ready(process)
        url = f"http://127.0.0.1:{port}"
        stack.enter_context(open_stream(port))

        def ask() -> None:
            answers.append(httpx.post(f"{url}/v1/completions", json=LONG, timeout=SOON))

        threads = [threading.Thread(target=ask) for _ in range(9)]
        for thread in threads:
            thread.start()

        def all_have_come() -> bool:
            metrics = httpx.get(f"{url}/metrics", timeout=SOON).text
            return "gemserve_requests_running 8.0" in metrics and "gemserve_requests_waiting 2.0" in metrics

        deadline = time.monotonic() + SOON
        while not all_have_come():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert ended(process) == 0
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [503] * 2
    for answer in answers:
        assert '"code":"shutting_down"' in answer.text
        if answer.status_code == 200:
            assert answer.text.endswith("\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_twice_ends_at_once(sent: signal.Signals) -> None:
    """Both the stream that is read and the one that is not would go on for half a minute."""
    with start("fake_model", shutdown_timeout=600) as process:
        port = wait_until_ready(process)
        url = f"http://127.0.0.1:{port}/v1/completions"
        with open_stream(port), httpx.stream("POST", url, json=LONG, timeout=SOON) as response:
            chunks = response.iter_text()
            next(chunks)
            process.send_signal(sent)
            wait_for_lines(process, "Shutting down")
            process.send_signal(sent)
            events = "".join(chunks).split("\n\n")
        assert ended(process) == (0 if sent is signal.SIGTERM else 130)
    assert '"code":"shutting_down"' in events[-3]
    assert events[-2:] == ["data: [DONE]", ""]


def test_while_a_step_takes_for_ever() -> None:
    """Without a step timeout nothing would end that step, and the process ends without it."""
    with start("fake_model", shutdown_timeout=0.2, step_timeout=0) as process:
        port = wait_until_ready(process)
        body = {**LONG, "prompt": [BOS, *[HANG] * 3]}
        with httpx.stream(
            "POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=SOON
        ) as response:
            chunks = response.iter_text()
            next(chunks)
            process.send_signal(signal.SIGTERM)
            events = "".join(chunks).split("\n\n")
        assert ended(process) == 0
    assert '"code":"shutting_down"' in events[-3]
