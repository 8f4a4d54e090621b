"""The process of ``gemserve serve`` when loading fails, the engine dies or a signal comes; loading is replaced to be quick."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.fakes import BOS, HANG

ROOT = Path(__file__).parent.parent.parent

PROGRAM = """
import sys, time
import model.checkpoint, server.cli.serving as serving
from model.errors import CheckpointError
from server.engine.async_engine import AsyncEngine, EngineLimits
from server.engine.loaded import LoadedEngine
from server.engine.stats import EngineStats
from server.grammar.compiler import GrammarCompiler
from server.settings import Settings

class DyingCore:
    has_work, last_step, stats = True, None, EngineStats()
    def step(self):
        raise RuntimeError("out of memory in a step")

def bad_weights(settings, report_phase, checkpoint):
    raise CheckpointError("model.safetensors: tensor model.norm.weight is truncated")

def dying_engine(settings, report_phase, checkpoint):
    engine = AsyncEngine(DyingCore(), EngineLimits(64, 1, 64))
    return LoadedEngine(engine, None, GrammarCompiler(None), ["m"], {}, "f", {}, {})

def native(settings, report_phase, checkpoint):
    import torch

    matrix = torch.ones(1000, 1000)
    print("loading now", file=sys.stderr, flush=True)
    while True:  # native code that takes the interpreter's lock again and again, as loading weights does
        matrix = torch.mm(matrix, matrix)

def fake_model(settings, report_phase, checkpoint):
    from tests.fakes import FakeRunner, fake_engine_factory

    return fake_engine_factory(FakeRunner(step_delay=0.01), max_model_len=4096)(settings, report_phase)

def endless(settings, report_phase, checkpoint):
    print("loading now", file=sys.stderr, flush=True)
    time.sleep(60)

model.checkpoint.open_checkpoint = lambda *args, **kwargs: None
serving.load_engine = globals()[sys.argv[1]]
try:
    options = dict(pair.split("=") for pair in sys.argv[4:])
    timeouts = {"shutdown_timeout": float(sys.argv[2]), "step_timeout": float(sys.argv[3])}
    sys.exit(serving.serve(Settings(port=0, **timeouts, **options)))
except KeyboardInterrupt:
    sys.exit(130)
"""


def start(behaviour: str, shutdown_timeout: float = 30, step_timeout: float = 0, **settings: str) -> subprocess.Popen[str]:
    options = [f"{name}={value}" for name, value in settings.items()]
    command = [sys.executable, "-c", PROGRAM, behaviour, str(shutdown_timeout), str(step_timeout), *options]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def wait_for_line(process: subprocess.Popen[str], text: str) -> list[str]:
    """What was logged up to the line that holds the text."""
    assert process.stderr is not None
    lines: list[str] = []
    while not lines or text not in lines[-1]:
        lines.append(process.stderr.readline())
        assert lines[-1], "".join(lines)
    return lines


def test_a_failed_load_ends_the_process_with_one_line() -> None:
    with start("bad_weights") as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert error.rstrip().endswith("gemserve: error: model.safetensors: tensor model.norm.weight is truncated")
    assert "Traceback" not in error


def test_a_dead_engine_ends_the_process() -> None:
    with start("dying_engine") as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert error.rstrip().endswith("gemserve: error: RuntimeError: out of memory in a step")


@pytest.mark.parametrize("is_told_to_stop", [False, True])
def test_a_step_that_hangs_ends_the_process(is_told_to_stop: bool) -> None:
    with start("fake_model", step_timeout=1) as process:
        port = int(wait_for_line(process, "listening on")[-1].rsplit(":", 1)[1])
        wait_for_line(process, "ready: serving")
        url = f"http://127.0.0.1:{port}"
        began = time.monotonic()
        body = {"prompt": [BOS, *[HANG] * 11], "max_tokens": 40, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
            chunks = response.iter_text()
            next(chunks)
            if is_told_to_stop:
                process.send_signal(signal.SIGTERM)
            events = "".join(chunks).split("\n\n")
        _, error = process.communicate(timeout=30)
        assert time.monotonic() - began < 10
    assert events[-2:] == ["data: [DONE]", ""]
    assert '"code":"internal_error"' in events[-3]
    assert process.returncode == 1
    assert error.rstrip().endswith("gemserve: error: EngineHungError: a step of the model did not end within 1 seconds")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


@pytest.mark.parametrize("behaviour", ["endless", "native"])
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_loading_ends_the_process_at_once(behaviour: str, sent: signal.Signals, code: int) -> None:
    with start(behaviour) as process:
        lines = wait_for_line(process, "loading now")
        assert any("Gemma Terms of Use" in line for line in lines)
        asked = time.monotonic()
        process.send_signal(sent)
        _, error = process.communicate(timeout=60)
    assert process.returncode == code, error
    assert time.monotonic() - asked < 10, "loading never ends, and nothing may wait for it"


@pytest.mark.parametrize(("shutdown_timeout", "ending"), [(30, '"finish_reason":"length"'), (0.2, '"code":"shutting_down"')])
def test_a_signal_lets_running_streams_finish_or_tells_them(shutdown_timeout: float, ending: str) -> None:
    with start("fake_model", shutdown_timeout) as process:
        port = int(wait_for_line(process, "listening on")[-1].rsplit(":", 1)[1])
        wait_for_line(process, "ready: serving")
        body = {"prompt": "a", "max_tokens": 100, "stream": True}
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30) as response:
            chunks = response.iter_text()
            next(chunks)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)  # a second one changes nothing
            events = "".join(chunks).split("\n\n")
        process.communicate(timeout=30)
    assert process.returncode == 0
    assert events[-2:] == ["data: [DONE]", ""]
    assert ending in events[-3]


def test_metrics_on_their_own_port_need_no_key_and_are_there_until_the_end_of_the_drain() -> None:
    with start("fake_model", metrics_port="0", api_key="secret") as process:
        metrics = wait_for_line(process, "metrics on")[-1].split()[-1]
        main = wait_for_line(process, "listening on")[-1].split()[-1]
        wait_for_line(process, "ready: serving")
        assert "gemserve_ready 1.0" in httpx.get(metrics).text
        assert httpx.get(metrics.replace("/metrics", "/health")).status_code == 404
        assert httpx.post(metrics).status_code == 405
        assert httpx.get(metrics, headers={"host": "evil.example"}).status_code == 403
        key = {"authorization": "Bearer secret"}
        assert httpx.get(f"{main}/metrics", headers=key).status_code == 404
        body = {"prompt": "a", "max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{main}/v1/completions", json=body, timeout=60, headers=key) as response:
            chunks = response.iter_text()
            next(chunks)
            process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 60
            while "gemserve_draining 1.0" not in (text := httpx.get(metrics).text):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert "gemserve_ready 0.0" in text
            assert "gemserve_requests_running 1.0" in text
            assert "[DONE]" in "".join(chunks)
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_metrics_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with start("endless", metrics_port=str(port)) as process:
            _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use; choose another --metrics-port or --host" in error


def test_a_log_in_json_is_json_from_the_first_line_to_the_last() -> None:
    with start("fake_model", step_timeout=1, log_format="json", log_stats_interval="0.2") as process:
        lines = wait_for_line(process, "listening on")
        port = int(json.loads(lines[-1])["message"].rsplit(":", 1)[1])
        lines += wait_for_line(process, "ready: serving")
        url = f"http://127.0.0.1:{port}/v1/completions"
        httpx.post(url, json={"prompt": "a", "max_tokens": 60}, timeout=60).raise_for_status()
        httpx.post(url, json={"prompt": [BOS, HANG], "max_tokens": 2}, timeout=60)
        _, rest = process.communicate(timeout=60)
    entries = [json.loads(line) for line in (*lines, *rest.splitlines())]
    assert process.returncode == 1
    assert "Gemma Terms of Use" in entries[0]["message"]
    assert all(entry.keys() >= {"timestamp", "level", "logger", "message"} for entry in entries)
    assert [entry["generated_tokens"] for entry in entries if entry.get("outcome") == "length"] == [60]
    assert any(entry["logger"] == "gemserve.stats" and entry["running"] == 1 for entry in entries)
    assert entries[-1]["level"] == "critical"
    assert entries[-1]["message"] == "EngineHungError: a step of the model did not end within 1 seconds"
