"""Runs a step that the device has no memory for in parts: half of its sequences at a time, then half of a
chunk's tokens, and so on. A single token that still does not fit fails its own sequence. Imports no torch."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from model.interface.sequence_chunk import (
    ChunkResult,
    Runner,
    SequenceChunk,
    StepInput,
    StepMemoryError,
    StepResult,
)

NO_MEMORY = "The server ran out of memory while it computed this request."
OnFault = Callable[[StepMemoryError], None]


def run_within_memory(runner: Runner, step: StepInput, on_fault: OnFault) -> StepResult:
    """The same as ``runner.run``. ``on_fault`` is told each time that memory ran out."""
    try:
        return runner.run(step)
    except StepMemoryError as error:
        on_fault(error)
    return run_in_parts(runner, step, on_fault)


def run_in_parts(runner: Runner, step: StepInput, on_fault: OnFault) -> StepResult:
    """The same for a step that is known not to fit as a whole.

    Parts may run one after the other because a sequence reads no blocks but its own, earlier ones first.
    """
    count = len(step)
    if count > 1:
        half = count // 2
        return _joined(
            run_within_memory(runner, step.part(0, half), on_fault),
            run_within_memory(runner, step.part(half, count), on_fault),
        )
    if step.num_tokens == 1:
        return StepResult.of([ChunkResult(error=NO_MEMORY)])
    (chunk,) = step.prefills
    parts = [
        run_within_memory(runner, replace(step, prefills=[half]), on_fault)[0] for half in _halves(chunk)
    ]
    failure = next((part.error for part in parts if part.error is not None), None)
    prompt_logprobs = [entry for part in parts for entry in part.prompt_logprobs]
    sums = [part.hidden_sum for part in parts if part.hidden_sum is not None]
    hidden_sum = np.sum(sums, axis=0) if sums else None
    return StepResult.of(
        [replace(parts[-1], prompt_logprobs=prompt_logprobs, hidden_sum=hidden_sum, error=failure)]
    )


def _joined(first: StepResult, second: StepResult) -> StepResult:
    moved = {index + len(first): other for index, other in second.others.items()}
    return StepResult(np.concatenate((first.token_ids, second.token_ids)), first.others | moved)


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

    def __init__(self, results: StepResult) -> None:
        self._results = results

    def results(self) -> StepResult:
        return self._results
