"""The sequences that run, a row each: a struct of arrays, the only form of what decodes. Imports no torch.

A row belongs to a sequence for as long as it runs. The engine owns the batch and moves it on; a runner reads
it, by row. Block tables are arrays of both layer groups; ``changes`` tells a runner whose device keeps a copy
of them what it has not seen yet. What one row computes in a step is one token today; columns for more
(positions to verify, an adapter) belong here.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from model.interface.grammar_state import GrammarState
from model.interface.random_streams import stream_states
from model.interface.sampling_params import SamplingParams

NULL_BLOCK = 0
GLOBAL, LOCAL = 0, 1  # layer groups: those that see every token, those with a window
IntArray = npt.NDArray[np.int64]
_NO_SAMPLING = SamplingParams(max_tokens=0)


class BlockChanges:
    """Entries of the block tables that were set since the runner last took them. Those of both groups are set
    together."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.indices: list[int] = []

    def clear(self) -> None:
        self.rows, self.indices = [], []


class RunningBatch:
    """Arrays of ``num_rows`` rows, one per running sequence. Rows without a sequence hold no meaningful
    values."""

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        """Allocate the arrays. ``max_blocks``: entries of a block table, as many as the longest sequence
        needs."""

        def column(dtype: type[np.generic]) -> npt.NDArray[Any]:
            return np.zeros(num_rows, dtype)

        self.num_rows = num_rows
        self.num_prompt_tokens: IntArray = column(np.int64)
        self.num_tokens: IntArray = column(np.int64)  # tokens that are known
        self.num_computed_tokens: IntArray = column(np.int64)  # tokens whose keys and values are in the cache
        self.max_num_tokens: IntArray = column(np.int64)  # length at which the sequence ends
        self.last_token_ids: IntArray = column(np.int64)
        # prompt and output tokens; each list belongs to its sequence
        self.token_ids: list[list[int]] = [[]] * num_rows
        self.sampling: list[SamplingParams] = [_NO_SAMPLING] * num_rows
        self.grammars: list[GrammarState | None] = [None] * num_rows  # what may be drawn; None: anything
        # whether a row needs only a token drawn from the unedited logits
        self.is_plain: npt.NDArray[np.bool_] = column(np.bool_)
        self.is_greedy: npt.NDArray[np.bool_] = column(np.bool_)
        self.temperature: npt.NDArray[np.float64] = column(np.float64)
        self.top_p: npt.NDArray[np.float64] = column(np.float64)
        self.min_p: npt.NDArray[np.float64] = column(np.float64)
        self.top_k: IntArray = column(np.int64)
        # what random numbers start from (random_streams.py)
        self.streams: npt.NDArray[np.uint64] = column(np.uint64)
        # [group, row, index]: block ids by position // block_size; the null block where a row has no block
        # yet, or no longer
        self.blocks: npt.NDArray[np.int32] = np.zeros((2, num_rows, max_blocks), np.int32)
        self.num_blocks: IntArray = column(np.int64)  # entries of a row's tables, the same of both groups
        self.changes = BlockChanges()
        self._first_rows = np.arange(num_rows)
        self._free = list(range(num_rows))
        heapify(self._free)

    @property
    def num_taken(self) -> int:
        return self.num_rows - len(self._free)

    def add(
        self,
        token_ids: list[int],
        num_prompt_tokens: int,
        sampling: SamplingParams,
        *,
        grammar: GrammarState | None = None,
        max_num_tokens: int = 0,
        num_computed_tokens: int = 0,
    ) -> int:
        """Take the lowest free row for a sequence of these tokens. Its block tables are empty."""
        row = heappop(self._free)
        self.num_prompt_tokens[row] = num_prompt_tokens
        self.num_tokens[row] = len(token_ids)
        self.num_computed_tokens[row] = num_computed_tokens
        self.max_num_tokens[row] = max_num_tokens
        self.last_token_ids[row] = token_ids[-1]
        self.token_ids[row] = token_ids
        self.set_sampling(row, sampling, grammar)
        return row

    def set_sampling(self, row: int, sampling: SamplingParams, grammar: GrammarState | None = None) -> None:
        """Set how a row's tokens are drawn."""
        self.sampling[row] = sampling
        self.grammars[row] = grammar
        self.is_plain[row] = sampling.plain and grammar is None
        self.is_greedy[row] = sampling.greedy
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.top_k[row] = min(sampling.top_k, np.iinfo(np.int64).max)
        self.streams[row] = stream_states([(sampling.seed, sampling.choice)])[0]

    def remove(self, row: int) -> None:
        """Give a row back. Its block tables become empty."""
        self.blocks[:, row, : self.num_blocks[row]] = NULL_BLOCK
        self.num_blocks[row] = 0
        self.token_ids[row] = []
        self.grammars[row] = None
        heappush(self._free, row)

    def set_blocks(
        self, rows: IntArray, indices: IntArray, global_blocks: Sequence[int], local_blocks: Sequence[int]
    ) -> None:
        """Append entries to block tables; several entries for one row must be in order."""
        self.blocks[:, rows, indices] = (global_blocks, local_blocks)
        self.num_blocks[rows] = indices + 1  # of several entries for one row, the last assignment wins
        self.changes.rows += rows.tolist()
        self.changes.indices += indices.tolist()

    def set_row_blocks(self, row: int, global_blocks: Sequence[int], local_blocks: Sequence[int]) -> None:
        """Append entries to one row's block tables."""
        indices = np.arange(len(global_blocks)) + self.num_blocks[row]
        self.set_blocks(np.full_like(indices, row), indices, global_blocks, local_blocks)

    def block_tables(self, rows: IntArray, width: int) -> npt.NDArray[np.int32]:
        """Return the block tables of these rows, [group, len(rows), width]: a view of ``blocks`` if these are
        the first rows in order, else a copy."""
        if np.count_nonzero(rows == self._first_rows[: len(rows)]) == len(rows):
            return self.blocks[:, : len(rows), :width]
        return np.stack([tables[rows, :width] for tables in self.blocks])
