"""What ``gemserve serve`` does to the process while it loads, and undoes."""

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent.parent

PROGRAM = """
import atexit, gc, sys
import model.checkpoint.open, server.cli.serving as serving
from server.__main__ import main

def load(settings, report_phase, checkpoint):
    from tests.fakes import FakeRunner, fake_engine_factory

    print("collections while loading:", gc.isenabled(), file=sys.stderr, flush=True)
    return fake_engine_factory(FakeRunner(), max_model_len=4096)(settings, report_phase)

model.checkpoint.open.open_checkpoint = lambda *args, **kwargs: None
serving.load_engine = load
@atexit.register
def report():
    print("collections at the end:", gc.isenabled(), gc.get_freeze_count() > 10_000, file=sys.stderr)

sys.exit(main(["serve", "--port", "0"]))
"""


def test_nothing_is_collected_while_loading_and_what_was_loaded_never_is() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines: list[str] = []
        while "ready: serving" not in "".join(lines):
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=60)
    assert process.returncode == 0, rest
    assert "collections while loading: False\n" in lines
    assert "collections at the end: True True" in rest
