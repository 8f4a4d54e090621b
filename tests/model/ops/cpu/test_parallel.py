"""The pool of helper threads: every item runs exactly once, without races, whoever calls and however
often."""

import os
import subprocess
from pathlib import Path

import pytest

from model.ops.cpu.build import SOURCES
from tests.model.ops.cpu.harness import needs_kernels


@needs_kernels
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_every_item_runs_once_without_races(sanitizer: str, tmp_path: Path) -> None:
    program = tmp_path / "hammer"
    source = Path(__file__).with_name("hammer_parallel.cpp")
    compiler = ["g++", "-std=c++17", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}", f"-I{SOURCES}"]
    subprocess.run(
        [*compiler, str(SOURCES / "parallel.cpp"), str(source), "-o", str(program)], check=True, timeout=120
    )
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    environment["ASAN_OPTIONS"] = "detect_leaks=0"  # the pool lives until the process ends
    finished = subprocess.run(
        [str(program)], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "every item once\n"
