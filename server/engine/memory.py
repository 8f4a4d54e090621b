"""Runs a step that the device has no memory for in parts: half of its chunks at a time, then half of a
chunk's tokens, and so on. A single token that still does not fit fails its own sequence. Imports no torch."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from model.interface.sequence_chunk import ChunkResult, Runner, SequenceChunk, StepMemoryError

NO_MEMORY = "The server ran out of memory while it computed this request."


def run_within_memory(
    runner: Runner, chunks: Sequence[SequenceChunk], on_fault: Callable[[StepMemoryError], None]
) -> Sequence[ChunkResult]:
    """One result per chunk, in order; the same as of ``runner.run``. ``on_fault`` is told each time that
    memory ran out."""
    try:
        return runner.run(chunks)
    except StepMemoryError as error:
        on_fault(error)
    return run_in_parts(runner, chunks, on_fault)


def run_in_parts(
    runner: Runner, chunks: Sequence[SequenceChunk], on_fault: Callable[[StepMemoryError], None]
) -> Sequence[ChunkResult]:
    """The same for chunks that are known not to fit together.

    Parts may run one after the other because a chunk reads no blocks but those of its own sequence, earlier
    ones first.
    """
    if len(chunks) > 1:
        half = len(chunks) // 2
        return [
            *run_within_memory(runner, chunks[:half], on_fault),
            *run_within_memory(runner, chunks[half:], on_fault),
        ]
    (chunk,) = chunks
    if len(chunk.token_ids) == 1:
        return [ChunkResult(error=NO_MEMORY)]
    parts = [run_within_memory(runner, [part], on_fault)[0] for part in _halves(chunk)]
    failure = next((part.error for part in parts if part.error is not None), None)
    prompt_logprobs = [entry for part in parts for entry in part.prompt_logprobs]
    sums = [part.hidden_sum for part in parts if part.hidden_sum is not None]
    hidden_sum = np.sum(sums, axis=0) if sums else None
    return [replace(parts[-1], prompt_logprobs=prompt_logprobs, hidden_sum=hidden_sum, error=failure)]


def _halves(chunk: SequenceChunk) -> tuple[SequenceChunk, SequenceChunk]:
    """The block tables of a chunk hold all that its tokens need, so they do for each half."""
    half = len(chunk.token_ids) // 2
    first = replace(
        chunk, token_ids=chunk.token_ids[:half], samples=False, prompt_targets=chunk.prompt_targets[:half]
    )
    second = replace(
        chunk,
        token_ids=chunk.token_ids[half:],
        start=chunk.start + half,
        prompt_targets=chunk.prompt_targets[half:],
    )
    return first, second


class KnownResults:
    """A LaunchedStep that has been waited for."""

    def __init__(self, results: Sequence[ChunkResult]) -> None:
        self._results = results

    def results(self) -> Sequence[ChunkResult]:
        return self._results
