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
    """The next tokens of a sequence that does more than decode: tokens of a prompt, or tokens that are
    computed again.

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
    """One step: rows that compute their last sampled token and draw the next one, then chunks. Each sequence
    occurs once."""

    batch: RunningBatch
    decodes: IntArray = field(default_factory=lambda: _NONE)  # [n] rows
    starts: IntArray = field(default_factory=lambda: _NONE)  # [n]: position of each row's token
    # [n]: the tokens to compute. None: the tokens that the step before drew in these rows and whose results
    # have not been asked for yet; where it could not draw one (not finite), any token may stand for it.
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
        """Make a step of one whole prompt, over the same blocks of both groups."""
        batch = RunningBatch(1, len(block_table))
        row = batch.add(list(token_ids), len(token_ids), sampling)
        batch.set_row_blocks(row, block_table, block_table)
        return cls(batch, prefills=[SequenceChunk(row, token_ids, 0, samples)])

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.decodes) + len(self.prefills)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.prefills)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + self.num_prefill_tokens

    @property
    def rows(self) -> IntArray:
        """The rows of all sequences, [len(self)]."""
        if not self.prefills:
            return self.decodes
        return np.concatenate(
            (self.decodes, np.array([chunk.row for chunk in self.prefills], dtype=np.int64))
        )

    @property
    def is_plain(self) -> "npt.NDArray[np.bool_]":
        """Whether each sequence needs only a token drawn from the unedited logits, bool [len(self)]."""
        plain = self.batch.is_plain[self.rows]
        for index, chunk in enumerate(self.prefills, len(self.decodes)):
            plain[index] &= chunk.samples and not chunk.pooling and not chunk.prompt_targets
        return plain

    def part(self, first: int, end: int) -> "StepInput":
        """The part of this step with its sequences [first, end)."""
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
    """The results of one sequence of a step. ``token_ids`` is empty if the sequence does not sample or its
    grammar is complete; speculation can return several."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token id, when asked for
    # one per prompt target, when asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    hidden_sum: "npt.NDArray[np.float64] | None" = None  # [h], for a chunk with ``pooling``
    error: str | None = None  # this sequence alone failed (non-finite numbers)


@dataclass(slots=True, eq=False)
class StepResult:
    """The results of a step, by the index of each sequence in it: a bare token, or a full result in
    ``others``."""

    # NO_TOKEN where the logits were not finite, and meaningless at the indices of ``others``
    token_ids: IntArray
    others: dict[int, ChunkResult] = field(default_factory=dict)

    @classmethod
    def of(cls, results: Sequence[ChunkResult]) -> "StepResult":
        """Wrap one full result per sequence."""
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
        """Return one full result per sequence."""
        return [self[index] for index in range(len(self))]


class LaunchedStep(Protocol):
    """A step that was handed to a runner, which may not have computed it yet."""

    def results(self) -> StepResult:
        """Wait for the device and return the results. To be called once."""
        ...


class Runner(Protocol):
    """The engine's view of a loaded model."""

    def run(self, step: StepInput) -> StepResult:
        """Run one step. Writes keys and values of all its tokens to the cache."""
        ...


@runtime_checkable
class AsyncRunner(Runner, Protocol):
    """A runner whose device computes while the host goes on. Steps are computed in the order in which they
    are launched."""

    def launch(self, step: StepInput) -> LaunchedStep:
        """Start a step without waiting for it: a later step may write to blocks that this one reads. Raises
        StepMemoryError; ``results`` of the returned step does not."""
        ...
