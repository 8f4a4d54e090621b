"""What one step runs, as the scheduler has chosen it. Imports no torch."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from server.engine.request import Request
from server.engine.scheduler.decode_group import DecodeGroup
from server.engine.stats import StepKind

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(slots=True)
class ScheduledChunk:
    """``num_tokens`` tokens of one request, from its first uncomputed one."""

    request: Request
    num_tokens: int

    @property
    def samples(self) -> bool:
        """The chunk reaches the last known token, and the request wants another one."""
        request = self.request
        return self.num_tokens == request.num_uncomputed_tokens and request.sampling.max_tokens > 0


@dataclass(slots=True)
class ScheduledBatch:
    """One step. ``decodes`` are requests that run the token sampled last, and nothing else; ``prefills`` all
    others."""

    decodes: list[Request] = field(default_factory=list)
    prefills: list[ScheduledChunk] = field(default_factory=list)
    num_preempted: int = 0
    group: DecodeGroup | None = None  # of ``decodes``, where they are the same as in the step before
    # Of a step that is launched before the results of the one before it: tokens of each of ``decodes``
    # without the one that is drawn there, and its place in that step; None: all of them, in the same order.
    num_tokens_before: "npt.NDArray[np.int64] | None" = None
    of_batch_before: "npt.NDArray[np.int64] | None" = None

    @property
    def num_sequences(self) -> int:
        return len(self.decodes) + len(self.prefills)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + self.num_prefill_tokens

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.prefills)

    def append_decode(self, request: Request) -> None:
        self.group = None
        self.decodes.append(request)

    def drop(self, request: Request) -> None:
        self.group = None
        self.decodes[:] = [other for other in self.decodes if other is not request]
        self.prefills[:] = [chunk for chunk in self.prefills if chunk.request is not request]

    @property
    def kind(self) -> StepKind:
        prefill = self.num_prefill_tokens
        return "decode" if prefill == 0 else "prefill" if prefill == self.num_tokens else "mixed"
