"""What crosses the border between engine and model in one step: rows that decode and chunks of prompts in,
tokens out. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from model.interface.running_batch import IntArray, RunningBatch
from model.interface.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy.typing as npt

NOT_FINITE = "The model's logits are not finite for this sequence."  # the error of a ChunkResult
NO_TOKEN = -1
_NONE: IntArray = np.zeros(0, dtype=np.int64)


class StepMemoryError(Exception):
    """The device has no memory for a step. Nothing has happened but writes to blocks of the step's own
    sequences, so that the same step may be run again, a part of it at a time."""


@dataclass(slots=True)
class SequenceChunk:
    """The next tokens of a sequence that does not just decode: of a prompt, or to be computed again.

    Query position p of the chunk is ``start + p``. Everything else about the sequence is told by its row of
    the running batch, whose block tables cover at least ``start + len(token_ids)`` positions.
    """

    row: int
    token_ids: Sequence[int]
    start: int  # number of this sequence's tokens whose keys and values are in the cache
    samples: bool  # the chunk ends with the sequence's last known token: draw the next one
    # Prompt log-probabilities: the token that follows position start + i, for i < len(prompt_targets) <=
    # len(token_ids).
    prompt_targets: Sequence[int] = ()
    pooling: bool = False  # the sum of the final hidden states of these tokens is wanted


@dataclass(slots=True)
class StepInput:
    """One step: rows that compute the token sampled last and draw the next one, then chunks. Each sequence is
    in it once."""

    batch: RunningBatch
    decodes: IntArray = field(default_factory=lambda: _NONE)  # [n] rows
    starts: IntArray = field(default_factory=lambda: _NONE)  # [n], as of a chunk
    # [n], the tokens to compute. None: those that the step before drew in these rows, which nobody has asked
    # for yet. Where it drew none, as of numbers that are not finite, any token stands for it.
    token_ids: IntArray | None = field(default_factory=lambda: _NONE)
    prefills: Sequence[SequenceChunk] = ()

    @classmethod
    def of_prompt(
        cls,
        token_ids: Sequence[int],
        block_table: Sequence[int],
        sampling: SamplingParams = SamplingParams(max_tokens=0),  # noqa: B008
        *,
        samples: bool = False,
    ) -> "StepInput":
        """A whole prompt on its own, over the same blocks of both groups."""
        batch = RunningBatch(1, len(block_table))
        row = batch.add(list(token_ids), len(token_ids), sampling)
        batch.set_row_blocks(row, block_table, block_table)
        return cls(batch, prefills=[SequenceChunk(row, token_ids, 0, samples)])

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.decodes) + len(self.prefills)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.prefills)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + self.num_prefill_tokens

    @property
    def rows(self) -> IntArray:
        """Of all sequences, [len(self)]."""
        if not self.prefills:
            return self.decodes
        return np.concatenate(
            (self.decodes, np.array([chunk.row for chunk in self.prefills], dtype=np.int64))
        )

    @property
    def is_plain(self) -> "npt.NDArray[np.bool_]":
        """Of which sequences one token is drawn from the logits as they are, and nothing else is wanted,
        [len(self)]."""
        plain = self.batch.is_plain[self.rows]
        for index, chunk in enumerate(self.prefills, len(self.decodes)):
            plain[index] &= chunk.samples and not chunk.pooling and not chunk.prompt_targets
        return plain

    def part(self, first: int, end: int) -> "StepInput":
        """Its sequences [first, end)."""
        count = len(self.decodes)
        decodes = slice(min(first, count), min(end, count))
        prefills = self.prefills[max(0, first - count) : max(0, end - count)]
        token_ids = None if self.token_ids is None else self.token_ids[decodes]
        return StepInput(self.batch, self.decodes[decodes], self.starts[decodes], token_ids, prefills)


@dataclass(slots=True)
class TokenLogprobs:
    """Raw log-probability of one token and of others (float32 values as Python floats): the likeliest,
    likeliest first, or those of ``SamplingParams.logprob_token_ids`` in their order."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    rank: int | None = None  # 1 for the likeliest; for tokens of a prompt only


@dataclass(slots=True)
class ChunkResult:
    """What one sequence of a step yielded. ``token_ids`` is empty unless it samples, and where its grammar
    turns out to be complete; speculation can return several."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token id, when asked for
    # one per prompt target, when asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    hidden_sum: "npt.NDArray[np.float64] | None" = None  # [h], where the chunk pools
    error: str | None = None  # this sequence alone failed (non-finite numbers)


@dataclass(slots=True, eq=False)
class StepResult:
    """What a step yielded, by the index of each sequence in it: a bare token, or more than that in
    ``others``."""

    # NO_TOKEN where the logits were not finite, and meaningless at the indices of ``others``
    token_ids: IntArray
    others: dict[int, ChunkResult] = field(default_factory=dict)

    @classmethod
    def of(cls, results: Sequence[ChunkResult]) -> "StepResult":
        """Of one result per sequence."""
        return cls(np.full(len(results), NO_TOKEN), dict(enumerate(results)))

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, index: int) -> ChunkResult:
        other = self.others.get(index)
        if other is not None:
            return other
        token_id = int(self.token_ids[index])
        return ChunkResult(error=NOT_FINITE) if token_id == NO_TOKEN else ChunkResult(token_ids=[token_id])

    def all(self) -> list[ChunkResult]:
        """One result per sequence."""
        return [self[index] for index in range(len(self))]


class LaunchedStep(Protocol):
    """A step that was handed to a runner, which may not have computed it yet."""

    def results(self) -> StepResult:
        """Waits for the device, and is asked once."""
        ...


class Runner(Protocol):
    """The engine's view of a loaded model."""

    def run(self, step: StepInput) -> StepResult:
        """Run one step. Writes keys and values of all its tokens to the cache."""
        ...


@runtime_checkable
class AsyncRunner(Runner, Protocol):
    """One whose device computes beside the host. Steps are computed in the order in which they are
    launched."""

    def launch(self, step: StepInput) -> LaunchedStep:
        """``run`` without the wait: blocks that a later step writes to may be those that this one reads.
        Raises StepMemoryError, ``results`` of what it returns does not."""
        ...
