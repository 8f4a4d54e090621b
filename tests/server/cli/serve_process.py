"""The process of ``gemserve serve`` with its loading replaced to be quick, to hang or to fail, or its
shutdown to come late."""

import re
import signal
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

from tests.server.cli.processes import line_with, start_program, wait_for_lines

PROGRAM = """
import os, signal, sys, time
import model.checkpoint.open, server.cli.serving as serving
from model.interface.errors import CheckpointError
from server.engine.async_engine import AsyncEngine, EngineLimits
from server.loading.load import LoadedEngine
from server.engine.stats import EngineStats
from server.grammar.compiler import GrammarCompiler
from server.settings.settings import Settings

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

late_shutdown = fake_model

# Says when it has handled a signal, and begins to shut down once it is told to by SIGUSR1.
class LateServer(serving.Server):
    may_shut_down = False

    def handle_exit(self, sig, frame):
        super().handle_exit(sig, frame)
        os.write(2, b"signal handled\\n")

    async def on_tick(self, counter):
        return await super().on_tick(counter) and self.may_shut_down

def let_shut_down(sig, frame):
    LateServer.may_shut_down = True

if sys.argv[1] == "late_shutdown":
    serving.Server = LateServer
    signal.signal(signal.SIGUSR1, let_shut_down)

model.checkpoint.open.open_checkpoint = lambda *args, **kwargs: None
serving.load_engine = globals()[sys.argv[1]]
try:
    port, shutdown_timeout, step_timeout = int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    sys.exit(serving.serve(Settings(port=port, shutdown_timeout=shutdown_timeout, step_timeout=step_timeout)))
except KeyboardInterrupt:
    sys.exit(130)
"""


def start(
    behaviour: str, shutdown_timeout: float = 30, step_timeout: float = 0, port: int = 0
) -> AbstractContextManager[subprocess.Popen[str]]:
    return start_program(PROGRAM, behaviour, str(port), str(shutdown_timeout), str(step_timeout))


def wait_until_ready(process: subprocess.Popen[str]) -> int:
    """The port."""
    lines = wait_for_lines(process, "listening on", "ready: serving")
    return int(line_with("listening on", lines).rsplit(":", 1)[1])


def wait_until_caught(process: subprocess.Popen[str], signum: signal.Signals) -> None:
    """Until the process has a handler of its own for the signal."""
    status = Path(f"/proc/{process.pid}/status")
    while not int(re.findall(r"SigCgt:\s*(\w+)", status.read_text())[0], 16) >> (signum - 1) & 1:
        assert process.poll() is None, "the process ended"
