"""Server processes whose standard error is read line by line."""

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent.parent


def start_program(program: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=_heed_interrupts)


def _heed_interrupts() -> None:
    """What a shell starts in the background ignores SIGINT, and so would all that is started from there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for_line(process: subprocess.Popen[str], text: str) -> list[str]:
    """What was logged up to the line that holds the text."""
    assert process.stderr is not None
    lines: list[str] = []
    while not lines or text not in lines[-1]:
        lines.append(process.stderr.readline())
        assert lines[-1], "".join(lines)
    return lines
