"""What crosses the border between engine and model in one step: chunks of sequences in, sampled tokens out. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from model.grammar_state import GrammarState
from model.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

NOT_FINITE = "The model's logits are not finite for this sequence."  # the error of a ChunkResult


class StepMemoryError(Exception):
    """The device has no memory for a step. Nothing has happened but writes to blocks of the step's own sequences, so that the
    same chunks may be run again, fewer or shorter ones at a time."""


@dataclass(slots=True)
class SequenceChunk:
    """The next tokens of one sequence to run through the network.

    Query position p of the chunk is ``start + p``. Block tables are indexed by position // block_size and cover at least
    ``start + len(token_ids)`` positions; entry 0 is the null block (recycled, outside the window, never read). A table that is
    the same list as in an earlier step holds the same blocks, but for those that were added to its end or became the null block.
    """

    token_ids: Sequence[int]
    start: int  # number of this sequence's tokens whose keys and values are in the cache
    global_block_table: Sequence[int]
    local_block_table: Sequence[int]
    sampling: SamplingParams
    samples: bool  # the chunk ends with the sequence's last known token: draw the next one
    prompt_token_ids: Sequence[int] = ()  # read for penalties only
    output_token_ids: Sequence[int] = ()  # tokens generated so far (its length is the position of the random draw)
    # Prompt log-probabilities: the token that follows position start + i, for i < len(prompt_targets) <= len(token_ids).
    prompt_targets: Sequence[int] = ()
    grammar: GrammarState | None = None  # what may be drawn; None: anything
    pools: bool = False  # the sum of the final hidden states of these tokens is wanted


@dataclass(slots=True)
class TokenLogprobs:
    """Raw log-probability of one token and of others (float32 values as Python floats): the likeliest, likeliest first, or those
    of ``SamplingParams.logprob_token_ids`` in their order."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    rank: int | None = None  # 1 for the likeliest; for tokens of a prompt only


@dataclass(slots=True)
class ChunkResult:
    """What one chunk yielded. ``token_ids`` is empty unless the chunk samples, and where its grammar turns out to be complete;
    speculation can return several."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token id, when asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per prompt target, when asked for
    hidden_sum: "npt.NDArray[np.float64] | None" = None  # [h], where the chunk pools
    error: str | None = None  # this sequence alone failed (non-finite numbers)


class Runner(Protocol):
    """The engine's view of a loaded model."""

    def run(self, chunks: Sequence[SequenceChunk]) -> list[ChunkResult]:
        """Run one step; one result per chunk, in order. Writes keys and values of every chunk's tokens to the cache."""
        ...
