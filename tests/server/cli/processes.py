"""Server processes whose standard error is read line by line."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent.parent


@contextlib.contextmanager
def start_program(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The process is killed at the end of the block if it still runs, as it may where a test has failed."""
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=_heed_interrupts
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _heed_interrupts() -> None:
    """What a shell starts in the background ignores SIGINT, and so would all that is started from there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for_lines(process: subprocess.Popen[str], *texts: str) -> list[str]:
    """What was logged until each of the texts had come, in whatever order: a quick load may be over before
    the port answers."""
    assert process.stderr is not None
    lines: list[str] = []
    missing = list(texts)
    while missing:
        lines.append(process.stderr.readline())
        assert lines[-1], "".join(lines)
        missing = [text for text in missing if text not in lines[-1]]
    return lines


def line_with(text: str, lines: Iterable[str]) -> str:
    """The first line that holds the text."""
    return next(line for line in lines if text in line)
