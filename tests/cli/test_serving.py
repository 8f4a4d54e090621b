"""The process of ``gemserve serve`` when loading fails, the engine dies or a signal comes; loading is replaced to be quick."""

import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

PROGRAM = """
import sys, time
import model.checkpoint, server.cli.serving as serving
from model.errors import CheckpointError
from server.engine.async_engine import AsyncEngine, EngineLimits
from server.engine.loaded import LoadedEngine
from server.engine.stats import EngineStats
from server.settings import Settings

class DyingCore:
    has_work, last_step, stats = True, None, EngineStats()
    def step(self):
        raise RuntimeError("out of memory in a step")

def bad_weights(settings, report_phase, checkpoint):
    raise CheckpointError("model.safetensors: tensor model.norm.weight is truncated")

def dying_engine(settings, report_phase, checkpoint):
    engine = AsyncEngine(DyingCore(), EngineLimits(64, 1, 64))
    return LoadedEngine(engine, None, ["m"], {}, "f", {}, {})

def endless(settings, report_phase, checkpoint):
    time.sleep(60)

model.checkpoint.open_checkpoint = lambda *args, **kwargs: None
serving.load_engine = globals()[sys.argv[1]]
sys.exit(serving.serve(Settings(port=0)))
"""


def start(behaviour: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, behaviour], cwd=ROOT, stderr=subprocess.PIPE, text=True)


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


def test_a_signal_while_loading_ends_the_process_at_once() -> None:
    with start("endless") as process:
        assert process.stderr is not None
        lines = []
        while "listening on" not in (line := process.stderr.readline()):
            lines.append(line)
            assert line, "".join(lines)
        assert any("Gemma Terms of Use" in line for line in lines)
        asked = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert time.monotonic() - asked < 10, "loading sleeps for 60 s, and nothing may wait for it"
