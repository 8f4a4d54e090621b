"""Loads checkpoints one after the other in a process of its own, runs a few steps of each and prints what
that took, as JSON: ``python -m tests.sizes.measure DTYPE FOLDER...``. Memory is the process's own (RssAnon of
Linux): the pages of mapped files belong to the system, which takes them back when it needs them.
"""

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from model.checkpoint.open import open_checkpoint
from model.execution.runner import ModelRunner
from model.network.layers import Linear
from model.ops.select import select_ops
from tests.model.harness import Harness, TestSequence

INTERVAL_SECONDS = 0.002
PROMPT = 40
CHUNK = 16
NUM_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes; and whether the model gave finite logits, and the same tokens for a prompt whole and in
    chunks."""

    weights: int
    largest: int  # of the matrices that are filled at once: fused ones
    peak: int  # beyond what the process held before
    kept: int
    global_blocks: int
    capacity_tokens: int
    is_finite: bool
    tokens: list[int]
    tokens_in_chunks: list[int]


def own_memory() -> int:
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None, "only Linux tells"
    return int(match[1]) << 10


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """A list with one number: the most memory held while the block ran."""
    peak, is_over = [own_memory()], threading.Event()

    def watch() -> None:
        while not is_over.wait(INTERVAL_SECONDS):
            peak[0] = max(peak[0], own_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()


def generate(runner: ModelRunner, chunk_size: int) -> tuple[bool, list[int]]:
    harness = Harness(runner.model, runner.ops, block_size=16, num_tokens=2 * PROMPT)
    generator = torch.Generator().manual_seed(1)
    sequence = TestSequence(
        torch.randint(3, runner.model.head.num_valid_tokens, (PROMPT,), generator=generator).tolist()
    )
    is_finite = True
    while len(sequence.tokens) < PROMPT + NUM_TOKENS:
        count = min(chunk_size, len(sequence.tokens) - sequence.num_computed)
        (logits,) = harness.logits([(sequence, count)])
        is_finite &= bool(logits.isfinite().all())
        if sequence.num_computed == len(sequence.tokens):
            sequence.tokens.append(int(logits[-1].argmax()))
    return is_finite, sequence.tokens[PROMPT:]


def measure(folder: Path, dtype: str) -> Measured:
    select_ops(torch.device("cpu"), torch.bfloat16)  # kernels and their library are there before
    checkpoint = open_checkpoint(str(folder), progress=False)
    before = own_memory()
    with peak_memory() as peak:
        runner = ModelRunner.load(checkpoint, dtype=dtype, device="cpu", progress=False)
        checkpoint.close()
    kept = own_memory() - before
    linears = [
        layer
        for layer in runner.model.modules()
        if isinstance(layer, Linear) and layer is not runner.model.head
    ]
    largest = max(layer.in_features * layer.out_features for layer in linears) * runner.ops.dtype.itemsize
    plan = runner.spec.plan(
        4 << 30, max_num_seqs=4, max_num_batched_tokens=512, max_model_len=32_768, prefix_caching=True
    )
    is_finite, tokens = generate(runner, PROMPT)
    is_finite_too, tokens_in_chunks = generate(runner, CHUNK)
    return Measured(
        weights=runner.weight_bytes,
        largest=largest,
        peak=peak[0] - before,
        kept=kept,
        global_blocks=plan.num_global_blocks,
        capacity_tokens=plan.capacity_tokens,
        is_finite=is_finite and is_finite_too,
        tokens=tokens,
        tokens_in_chunks=tokens_in_chunks,
    )


if __name__ == "__main__":
    for folder in sys.argv[2:]:
        print(json.dumps(asdict(measure(Path(folder), sys.argv[1]))))
