"""The process of ``gemserve serve`` as those see it who watch it: the listener of the metrics and the log in
JSON; loading is replaced to be quick."""

import functools
import json
import signal
import socket
import subprocess
import time
from contextlib import AbstractContextManager

import httpx

from tests.fakes import BOS, HANG
from tests.server.cli.processes import line_with, start_program, wait_for_lines

get = functools.partial(httpx.get, timeout=60)

PROGRAM = """
import signal, sys
import model.checkpoint.open, server.cli.serving as serving
from server.settings.settings import Settings
from tests.fakes import FakeRunner, fake_engine_factory

runner = FakeRunner(step_delay=0.01)
signal.signal(signal.SIGUSR1, lambda signum, frame: runner.released.set())

def fake_model(settings, report_phase, checkpoint):
    return fake_engine_factory(runner)(settings, report_phase)

model.checkpoint.open.open_checkpoint = lambda *args, **kwargs: None
serving.load_engine = fake_model
sys.exit(serving.serve(Settings(port=0, **dict(pair.split("=") for pair in sys.argv[1:]))))
"""


def start(**settings: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return start_program(PROGRAM, *(f"{name}={value}" for name, value in settings.items()))


def test_metrics_on_their_own_port_need_no_key_and_are_there_until_the_end_of_the_drain() -> None:
    with start(metrics_port="0", api_key="secret", shutdown_timeout="60") as process:
        lines = wait_for_lines(process, "metrics on", "listening on", "ready: serving")
        metrics, main = (line_with(text, lines).split()[-1] for text in ("metrics on", "listening on"))
        assert "gemserve_ready 1.0" in get(metrics).text
        assert get(metrics.replace("/metrics", "/health")).status_code == 404
        assert httpx.post(metrics, timeout=60).status_code == 405
        assert get(metrics, headers={"host": "evil.example"}).status_code == 403
        for path in ("/v1/completions", "/v1/messages"):  # which are not here
            refused = httpx.post(
                metrics.replace("/metrics", path), headers={"host": "evil.example"}, timeout=60
            )
            assert refused.status_code == 403
        key = {"authorization": "Bearer secret"}
        assert get(f"{main}/metrics", headers=key).status_code == 404
        body = {
            "prompt": [BOS, HANG, HANG],
            "max_tokens": 4,
            "stream": True,
        }  # stops behind its first token until it is told
        with httpx.stream("POST", f"{main}/v1/completions", json=body, timeout=60, headers=key) as response:
            chunks = response.iter_text()
            next(chunks)
            process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 60
            while "gemserve_draining 1.0" not in (text := get(metrics).text):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert "gemserve_ready 0.0" in text
            assert "gemserve_requests_running 1.0" in text
            process.send_signal(signal.SIGUSR1)
            assert "[DONE]" in "".join(chunks)
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_metrics_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with start(metrics_port=str(port)) as process:
            _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert (
        f"cannot listen on 127.0.0.1 port {port}: Address already in use; "
        "choose another --metrics-port or --host" in error
    )


def test_a_log_in_json_is_json_from_the_first_line_to_the_last() -> None:
    with start(step_timeout="1", log_format="json", log_stats_interval="0.2") as process:
        lines = wait_for_lines(process, "listening on", "ready: serving")
        port = int(json.loads(line_with("listening on", lines))["message"].rsplit(":", 1)[1])
        url = f"http://127.0.0.1:{port}/v1/completions"
        httpx.post(url, json={"prompt": "a", "max_tokens": 60}, timeout=60).raise_for_status()
        httpx.post(url, json={"prompt": [BOS, HANG], "max_tokens": 2}, timeout=60)
        _, rest = process.communicate(timeout=60)
    entries = [json.loads(line) for line in (*lines, *rest.splitlines())]
    assert process.returncode == 1
    assert "Gemma Terms of Use" in entries[0]["message"]
    assert all(entry.keys() >= {"timestamp", "level", "logger", "message"} for entry in entries)
    assert [entry["generated_tokens"] for entry in entries if entry.get("outcome") == "length"] == [60]
    assert any(entry["logger"] == "gemserve.stats" and "kv_cache_usage_ratio" in entry for entry in entries)
    assert entries[-1]["level"] == "critical"
    assert entries[-1]["message"] == "EngineHungError: a step of the model did not end within 1 seconds"
