"""A step between its launch and its results. Tokens are copied to pinned memory as soon as the device has
drawn them, and an event says when they are there, so that nothing but the reader of the results waits."""

import numpy as np
import torch

from model.interface.running_batch import IntArray
from model.interface.sequence_chunk import NO_TOKEN, ChunkResult, StepResult


class PendingStep:
    """A step that was handed to the device. Plain tokens are still being copied to the host; all other
    results are there."""

    def __init__(
        self, others: dict[int, ChunkResult], drawn: torch.Tensor | None = None, plain: IntArray | None = None
    ) -> None:
        """Start the copy of the tokens ``drawn`` int64 [k]. They belong to the sequences with the indices
        ``plain`` [k], or to all of the step's where that is None; ``others`` are the results of the rest."""
        self._others = others
        self._plain = plain
        self._drawn = drawn
        self._copied: torch.cuda.Event | None = None
        if drawn is not None and drawn.device.type == "cuda":
            self._drawn = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=True).copy_(
                drawn, non_blocking=True
            )
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def results(self) -> StepResult:
        """Wait for the device and return the results."""
        if self._copied is not None:
            self._copied.synchronize()
        drawn = np.zeros(0, dtype=np.int64) if self._drawn is None else self._drawn.numpy()
        if not self._others:
            return StepResult(drawn)
        of_all = np.full(len(drawn) + len(self._others), NO_TOKEN)
        if self._plain is not None:
            of_all[self._plain] = drawn
        return StepResult(of_all, self._others)
