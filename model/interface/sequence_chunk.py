"""What crosses the border between engine and model in one step: chunks of sequences in, sampled tokens out.
No torch."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, overload, runtime_checkable

import numpy as np

from model.interface.block_tables import BlockTableRows
from model.interface.grammar_state import GrammarState
from model.interface.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy.typing as npt

NOT_FINITE = "The model's logits are not finite for this sequence."  # the error of a ChunkResult


class StepMemoryError(Exception):
    """The device has no memory for a step. Nothing has happened but writes to blocks of the step's own
    sequences, so that the same chunks may be run again, fewer or shorter ones at a time."""


@dataclass(slots=True)
class SequenceChunk:
    """The next tokens of one sequence to run through the network.

    Query position p of the chunk is ``start + p``. Block tables are indexed by position // block_size and
    cover at least ``start + len(token_ids)`` positions; entry 0 is the null block (recycled, outside the
    window, never read). Tables and output are the engine's own: they hold until the step ends. A table that
    is the same list as in an earlier step holds the same blocks, but for those that were added to its end or
    became the null block.
    """

    token_ids: Sequence[int]
    start: int  # number of this sequence's tokens whose keys and values are in the cache
    global_block_table: Sequence[int]
    local_block_table: Sequence[int]
    sampling: SamplingParams
    samples: bool  # the chunk ends with the sequence's last known token: draw the next one
    prompt_token_ids: Sequence[int] = ()  # read for penalties only
    output_token_ids: Sequence[int] = ()  # tokens generated so far; read for penalties only
    # Prompt log-probabilities: the token that follows position start + i, for i < len(prompt_targets) <=
    # len(token_ids).
    prompt_targets: Sequence[int] = ()
    grammar: GrammarState | None = None  # what may be drawn; None: anything
    pools: bool = False  # the sum of the final hidden states of these tokens is wanted
    position: int = (
        -1
    )  # of the random draw: the number of tokens generated so far, which is what a negative one becomes
    tables: BlockTableRows | None = (
        None  # where both block tables are also row ``row``: of all chunks of a step, or of none
    )
    row: int = 0

    def __post_init__(self) -> None:
        if self.position < 0:
            self.position = len(self.output_token_ids)

    @property
    def plain(self) -> bool:
        """One token is drawn, from the logits as they are, and nothing else is wanted."""
        asks = self.pools or self.grammar is not None or bool(self.prompt_targets)
        return self.samples and not asks and self.sampling.plain


class LaunchedStep(Protocol):
    """A step that was handed to a runner, which may not have computed it yet."""

    def results(self) -> Sequence["ChunkResult"]:
        """One per chunk, in order. Waits for the device, and is asked once."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DrawnTokens:
    """Tokens that a step draws whose results nobody has asked for. Where it draws none, as of numbers that
    are not finite, any token stands for it."""

    step: LaunchedStep  # all of whose chunks are plain
    chunks: "npt.NDArray[np.int64] | None"  # of these, in this order; None: of all


NO_TOKENS: "npt.NDArray[np.int64]" = np.zeros(0, dtype=np.int64)


class DecodeChunks(Sequence[SequenceChunk]):
    """One token of each of many sequences, which are the same from step to step, as arrays: a runner then has
    no loop over them.

    As a sequence it makes the chunks themselves, for whoever wants these. The owner moves it on with
    ``move``, or with ``follow`` while the tokens are not known yet: then there are no chunks to be made.
    """

    def __init__(
        self,
        sampling: Sequence[SamplingParams],
        num_prompt_tokens: Sequence[int],
        tables: BlockTableRows,
        rows: Sequence[int],
        block_tables: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        plain: bool,
        make_chunk: Callable[[int], SequenceChunk],
    ) -> None:
        """``make_chunk`` gives the chunk of an index, as it is now."""
        self.sampling = sampling
        self.tables = tables
        self.rows = np.array(rows, dtype=np.int64)
        self.block_tables = block_tables  # the global and the local one of each, as of a chunk
        self.plain = plain  # each of them is
        self.token_ids = self.starts = NO_TOKENS  # [n], as of a chunk
        self.drawn: DrawnTokens | None = None  # instead of ``token_ids``
        self.scratch: dict[
            Hashable, Any
        ] = {}  # a runner's own plans, which hold as long as the sequences are the same
        self._num_prompt_tokens = np.array(num_prompt_tokens, dtype=np.int64)
        self._make_chunk = make_chunk

    def move(self, token_ids: "npt.NDArray[np.int64]", starts: "npt.NDArray[np.int64]") -> None:
        """Both [n], and not to be written to afterwards."""
        self.token_ids = token_ids
        self.starts = starts
        self.drawn = None

    def follow(self, drawn: DrawnTokens, starts: "npt.NDArray[np.int64]") -> None:
        """To tokens that a step draws which has been launched before."""
        self.token_ids = NO_TOKENS
        self.starts = starts
        self.drawn = drawn

    @property
    def positions(self) -> "npt.NDArray[np.int64]":
        """[n], of the random draws."""
        return self.starts + 1 - self._num_prompt_tokens

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> SequenceChunk: ...

    @overload
    def __getitem__(self, index: slice) -> list[SequenceChunk]: ...

    def __getitem__(self, index: int | slice) -> SequenceChunk | list[SequenceChunk]:
        assert self.drawn is None, "the tokens are not known yet"
        indices = range(len(self))[index]
        return (
            self._make_chunk(indices) if isinstance(indices, int) else [self._make_chunk(i) for i in indices]
        )

    def __iter__(self) -> Iterator[SequenceChunk]:
        return iter(self[:])


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
    """What one chunk yielded. ``token_ids`` is empty unless the chunk samples, and where its grammar turns
    out to be complete; speculation can return several."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token id, when asked for
    prompt_logprobs: list[TokenLogprobs] = field(
        default_factory=list
    )  # one per prompt target, when asked for
    hidden_sum: "npt.NDArray[np.float64] | None" = None  # [h], where the chunk pools
    error: str | None = None  # this sequence alone failed (non-finite numbers)


class SampledTokens(Sequence[ChunkResult]):
    """The results of chunks that yielded a token each and nothing else. As a sequence it makes ChunkResults
    of them."""

    def __init__(self, token_ids: list[int]) -> None:
        """-1: the logits were not finite."""
        self.token_ids = token_ids

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> ChunkResult: ...

    @overload
    def __getitem__(self, index: slice) -> list[ChunkResult]: ...

    def __getitem__(self, index: int | slice) -> ChunkResult | list[ChunkResult]:
        if isinstance(index, slice):
            return [sampled(token_id) for token_id in self.token_ids[index]]
        return sampled(self.token_ids[index])


def sampled(token_id: int) -> ChunkResult:
    """The result of one of SampledTokens."""
    return ChunkResult(token_ids=[token_id]) if token_id >= 0 else ChunkResult(error=NOT_FINITE)


class Runner(Protocol):
    """The engine's view of a loaded model."""

    def run(self, chunks: Sequence[SequenceChunk]) -> Sequence[ChunkResult]:
        """Run one step; one result per chunk, in order. Writes keys and values of every chunk's tokens to the
        cache."""
        ...


@runtime_checkable
class AsyncRunner(Runner, Protocol):
    """One whose device computes beside the host. Steps are computed in the order in which they are
    launched."""

    def launch(self, chunks: Sequence[SequenceChunk]) -> LaunchedStep:
        """``run`` without the wait: blocks that a later step writes to may be those that this one reads.
        Raises StepMemoryError, ``results`` of what it returns does not."""
        ...
