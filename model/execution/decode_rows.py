"""Which row of the decode buffers holds which sequence, and what of its block tables the device has yet to be
told. No torch.

A sequence keeps its row for as long as it decodes, so that a step sends no more of the tables than the blocks
that were added since: one entry in every ``block_size`` steps. When sequences end, others take the rows that
became free, and only those are sent whole. While a step has the same sequences as the one before, nothing
here loops over all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from model.interface.sequence_chunk import DecodeChunks, SequenceChunk

IntArray = npt.NDArray[np.int64]
Tables = tuple[Sequence[int], Sequence[int]]  # the global and the local one of a sequence


@dataclass(slots=True)
class DecodeLayout:
    """One step of n sequences: their rows, what each row computes, and the entries of the tables that
    changed."""

    rows: IntArray  # row of each chunk: a permutation of range(n)
    token_ids: IntArray | None  # of each chunk, as the following; None: the device has them
    positions: IntArray
    global_slots: IntArray  # block id * B + position % B
    local_slots: IntArray
    places: list[int] = field(
        default_factory=list
    )  # in [2, num_rows, table_width] flattened: global tables, then local ones
    entries: list[int] = field(default_factory=list)  # the block id that belongs there


@dataclass(slots=True)
class _Row:
    global_table: Sequence[int]
    local_table: Sequence[int]


class DecodeRows:
    """The host's account of tables [2, num_rows, table_width] on the device, which hold what ``lay_out`` has
    returned so far."""

    def __init__(self, num_rows: int, table_width: int, block_size: int, window: int) -> None:
        self._table_width = table_width
        self._local_offset = num_rows * table_width
        self._block_size = block_size
        self._window = window
        self._rows: list[_Row | None] = [None] * num_rows
        # Entries of each row that the device has; of local tables none but those that a query can still
        # reach.
        self._num_blocks = np.zeros(num_rows, dtype=np.int64)
        # By identity of the global table: a table is one list for as long as its sequence runs. Rows keep
        # their tables alive, so that no other list can have the identity of one that is known here.
        self._row_of: dict[int, int] = {}
        self._last: Sequence[SequenceChunk] | None = None
        self._last_rows: IntArray = np.zeros(0, dtype=np.int64)

    def lay_out(self, chunks: Sequence[SequenceChunk]) -> DecodeLayout:
        """Lay out a step of at most ``num_rows`` chunks with one token each."""
        if isinstance(chunks, DecodeChunks):
            token_ids = chunks.token_ids if chunks.drawn is None else None
            positions = chunks.starts
            if self._last is not chunks:  # else its sequences are those of the last step, and have their rows
                self._last_rows = self._assign(chunks.block_tables)
        else:
            token_ids = np.array([chunk.token_ids[0] for chunk in chunks], dtype=np.int64)
            positions = np.array([chunk.start for chunk in chunks], dtype=np.int64)
            self._last_rows = self._assign(
                [(chunk.global_block_table, chunk.local_block_table) for chunk in chunks]
            )
        self._last, rows = chunks, self._last_rows
        blocks, offsets = positions // self._block_size, positions % self._block_size
        if isinstance(chunks, DecodeChunks):
            global_blocks, local_blocks = chunks.tables.blocks[:, chunks.rows, blocks].astype(np.int64)
        else:
            each = list(zip(chunks, blocks.tolist(), strict=True))
            global_blocks = np.array(
                [chunk.global_block_table[block] for chunk, block in each], dtype=np.int64
            )
            local_blocks = np.array([chunk.local_block_table[block] for chunk, block in each], dtype=np.int64)
        assert global_blocks.all(), "a token is to be written to the null block"
        assert local_blocks.all(), "a token is to be written to the null block"
        slots = (global_blocks * self._block_size + offsets, local_blocks * self._block_size + offsets)
        layout = DecodeLayout(rows, token_ids, positions, *slots)
        for index in (self._num_blocks[rows] <= blocks).nonzero()[0]:
            self._extend(layout, int(rows[index]), int(blocks[index]) + 1)
        return layout

    def _assign(self, tables: Sequence[Tables]) -> IntArray:
        """Rows 0 to n - 1 for sequences with these tables: those that have one of these keep it."""
        count = len(tables)
        rows = [self._row_of.get(id(global_table), count) for global_table, _ in tables]
        newcomers = []
        taken = bytearray(count)
        for index, row in enumerate(rows):
            if row >= count or taken[row] or not self._holds(row, *tables[index]):
                newcomers.append(index)
            else:
                taken[row] = 1
        if newcomers:
            free = (row for row in range(count) if not taken[row])
            for index, row in zip(newcomers, free, strict=True):
                rows[index] = row
                self._move_in(row, *tables[index])
        return np.array(rows, dtype=np.int64)

    def _holds(self, index: int, global_table: Sequence[int], local_table: Sequence[int]) -> bool:
        row = self._rows[index]
        return row is not None and row.global_table is global_table and row.local_table is local_table

    def _move_in(self, index: int, global_table: Sequence[int], local_table: Sequence[int]) -> None:
        before = self._rows[index]
        if before is not None and self._row_of.get(id(before.global_table)) == index:
            del self._row_of[id(before.global_table)]
        self._rows[index] = _Row(global_table, local_table)
        self._num_blocks[index] = 0
        self._row_of[id(global_table)] = index

    def _extend(self, layout: DecodeLayout, index: int, num_blocks: int) -> None:
        row, known = self._rows[index], int(self._num_blocks[index])
        assert row is not None
        place = index * self._table_width
        layout.places.extend(range(place + known, place + num_blocks))
        layout.entries.extend(row.global_table[known:num_blocks])
        # What lies behind the window is never read, and may be of the row's former sequence.
        position = (num_blocks - 1) * self._block_size
        first = max(known, max(0, position - self._window + 1) // self._block_size)
        layout.places.extend(
            range(self._local_offset + place + first, self._local_offset + place + num_blocks)
        )
        layout.entries.extend(row.local_table[first:num_blocks])
        self._num_blocks[index] = num_blocks
