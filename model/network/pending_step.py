"""A step between its launch and its results. Tokens are copied to pinned memory as soon as the device has
drawn them, and an event says when they are there, so that nothing but the reader of the results waits."""

from collections.abc import Sequence

import torch

from model.interface.sequence_chunk import ChunkResult, SampledTokens


class PendingStep:
    """A step that was handed to the device. Tokens of plain chunks are on their way to the host; all else is
    there."""

    def __init__(
        self,
        results: list[ChunkResult | None] | None,
        plain: Sequence[int] = (),
        drawn: torch.Tensor | None = None,
    ) -> None:
        """``results`` are None at the indices in ``plain``, whose tokens are ``drawn``. None: all are such,
        of DecodeChunks."""
        self._results = results
        self._plain = plain
        self._drawn = self._on_device = drawn
        self._copied: torch.cuda.Event | None = None
        if drawn is not None and drawn.device.type == "cuda":
            self._drawn = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=True).copy_(
                drawn, non_blocking=True
            )
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def token_ids(self, chunks: torch.Tensor | None) -> torch.Tensor:
        """int64 [n] on the device, of these or of all of its chunks, for the next step; nobody waits for
        them. Where there is no token, because logits were not finite, it is 0: one that can be computed."""
        assert self._results is None, "not all of its chunks are plain"
        assert self._on_device is not None
        drawn = self._on_device if chunks is None else self._on_device.index_select(0, chunks)
        return drawn.clamp(min=0)

    def results(self) -> Sequence[ChunkResult]:
        """One per chunk, in order. Waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens = SampledTokens([] if self._drawn is None else self._drawn.tolist())
        if self._results is None:
            return tokens
        for index, result in zip(self._plain, tokens, strict=True):
            self._results[index] = result
        return [result for result in self._results if result is not None]
