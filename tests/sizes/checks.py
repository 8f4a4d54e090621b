"""What must hold for a checkpoint of any size: it loads within its weights and one matrix more, is planned,
and runs."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.sizes.checkpoints import write_checkpoint
from tests.sizes.measure import Measured

ROOT = Path(__file__).parents[2]
# Python's objects, threads' stacks, freed matrices of up to 32 MiB, which the allocator keeps: it does not
# grow with the model.
SLACK_BYTES = 64 << 20


def run_sizes(
    sizes: Sequence[str], *, dtype: str = "bfloat16", vocab_size: int | None = None, num_threads: int = 1
) -> dict[str, Measured]:
    """Write, load and run each size with one local and one global layer, in a process of their own;
    checked."""
    with tempfile.TemporaryDirectory(prefix="gemserve-sizes-") as folder:
        folders = [Path(folder) / size for size in sizes]
        for size, place in zip(sizes, folders, strict=True):
            write_checkpoint(place, size, vocab_size=vocab_size)
        command = [sys.executable, "-m", "tests.sizes.measure", dtype, *map(str, folders)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    measured = {
        size: Measured(**json.loads(line)) for size, line in zip(sizes, done.stdout.splitlines(), strict=True)
    }
    for values in measured.values():
        check(values)
    return measured


def check(measured: Measured) -> None:
    assert measured.peak <= measured.weights + measured.largest + SLACK_BYTES, (
        f"loading took too much memory: {measured}"
    )
    assert measured.kept <= measured.weights + SLACK_BYTES, (
        f"a loaded model keeps more than its weights: {measured}"
    )
    assert measured.is_finite
    assert measured.tokens == measured.tokens_in_chunks
    assert measured.capacity_tokens >= 4 * 1024
