"""The process of ``gemserve serve`` when loading fails, the engine dies or a signal comes; loading is replaced to be quick."""

import signal
import subprocess
import time

import httpx
import pytest

from tests.cli.processes import start_program, wait_for_line
from tests.fakes import BOS, HANG

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
    return LoadedEngine(engine, None, GrammarCompiler(None), ["m"], 4, {}, "f", {}, {})

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
    sys.exit(serving.serve(Settings(port=0, shutdown_timeout=float(sys.argv[2]), step_timeout=float(sys.argv[3]))))
except KeyboardInterrupt:
    sys.exit(130)
"""


def start(behaviour: str, shutdown_timeout: float = 30, step_timeout: float = 0) -> subprocess.Popen[str]:
    return start_program(PROGRAM, behaviour, str(shutdown_timeout), str(step_timeout))


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
