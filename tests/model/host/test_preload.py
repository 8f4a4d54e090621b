"""Torch works as ever when its libraries were linked beforehand, and they are linked once."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent.parent

PROGRAM = """
from model.host.preload import preload_libraries

thread = preload_libraries()
assert thread is not None
thread.join()
import torch
assert preload_libraries() is None  # too late
x = torch.arange(6.0).view(2, 3)
assert torch.nn.functional.linear(x, x).tolist() == [[5.0, 14.0], [14.0, 50.0]]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the linker of Linux")
def test_libraries_are_linked_before_the_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
