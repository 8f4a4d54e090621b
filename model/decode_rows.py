"""Which row of the decode buffers holds which sequence, and what of its block tables the device has yet to be told. No torch.

A sequence keeps its row for as long as it decodes, so that a step sends no more of the tables than the blocks that were added
since: one entry in every ``block_size`` steps. When sequences end, others take the rows that became free, and only those are sent
whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from model.sequence_chunk import SequenceChunk


@dataclass(slots=True)
class DecodeLayout:
    """One step of n sequences: their rows, what each row computes, and the entries of the tables that changed."""

    rows: list[int]  # row of each chunk: a permutation of range(n)
    token_ids: list[int]  # of each chunk, as the following
    positions: list[int]
    global_slots: list[int]  # block id * B + position % B
    local_slots: list[int]
    places: list[int] = field(default_factory=list)  # in [2, num_rows, table_width] flattened: global tables, then local ones
    entries: list[int] = field(default_factory=list)  # the block id that belongs there


@dataclass(slots=True)
class _Row:
    global_table: Sequence[int]
    local_table: Sequence[int]
    num_blocks: int  # entries that the device has; of the local table none but those that a query can still reach


class DecodeRows:
    """The host's account of tables [2, num_rows, table_width] on the device, which hold what ``lay_out`` has returned so far."""

    def __init__(self, num_rows: int, table_width: int, block_size: int, window: int) -> None:
        self._table_width = table_width
        self._local_offset = num_rows * table_width
        self._block_size = block_size
        self._window = window
        self._rows: list[_Row | None] = [None] * num_rows
        # By identity of the global table: a table is one list for as long as its sequence runs. Rows keep their tables alive, so
        # that no other list can have the identity of one that is known here.
        self._row_of: dict[int, int] = {}

    def lay_out(self, chunks: Sequence[SequenceChunk]) -> DecodeLayout:
        """Lay out a step of at most ``num_rows`` chunks with one token each."""
        block_size = self._block_size
        layout = DecodeLayout(self._assign(chunks), [], [], [], [])
        for chunk, index in zip(chunks, layout.rows, strict=True):
            row = self._rows[index]
            assert row is not None
            position = chunk.start
            block, offset = divmod(position, block_size)
            if row.num_blocks <= block:
                self._extend(layout, index, row, block + 1)
            global_block, local_block = row.global_table[block], row.local_table[block]
            assert min(global_block, local_block) > 0, "a token is to be written to the null block"
            layout.token_ids.append(chunk.token_ids[0])
            layout.positions.append(position)
            layout.global_slots.append(global_block * block_size + offset)
            layout.local_slots.append(local_block * block_size + offset)
        return layout

    def _assign(self, chunks: Sequence[SequenceChunk]) -> list[int]:
        """Rows 0 to n - 1: those that have one of these keep it."""
        num_chunks = len(chunks)
        rows = [self._row_of.get(id(chunk.global_block_table), num_chunks) for chunk in chunks]
        newcomers = []
        taken = bytearray(num_chunks)
        for index, row in enumerate(rows):
            if row >= num_chunks or taken[row] or not self._holds(row, chunks[index]):
                newcomers.append(index)
            else:
                taken[row] = 1
        if newcomers:
            free = (row for row in range(num_chunks) if not taken[row])
            for index, row in zip(newcomers, free, strict=True):
                rows[index] = row
                self._move_in(row, chunks[index])
        return rows

    def _holds(self, index: int, chunk: SequenceChunk) -> bool:
        row = self._rows[index]
        return row is not None and row.global_table is chunk.global_block_table and row.local_table is chunk.local_block_table

    def _move_in(self, index: int, chunk: SequenceChunk) -> None:
        before = self._rows[index]
        if before is not None and self._row_of.get(id(before.global_table)) == index:
            del self._row_of[id(before.global_table)]
        self._rows[index] = _Row(chunk.global_block_table, chunk.local_block_table, 0)
        self._row_of[id(chunk.global_block_table)] = index

    def _extend(self, layout: DecodeLayout, index: int, row: _Row, num_blocks: int) -> None:
        place = index * self._table_width
        layout.places.extend(range(place + row.num_blocks, place + num_blocks))
        layout.entries.extend(row.global_table[row.num_blocks : num_blocks])
        # What lies behind the window is never read, and may be of the row's former sequence.
        position = (num_blocks - 1) * self._block_size
        first = max(row.num_blocks, max(0, position - self._window + 1) // self._block_size)
        layout.places.extend(range(self._local_offset + place + first, self._local_offset + place + num_blocks))
        layout.entries.extend(row.local_table[first:num_blocks])
        row.num_blocks = num_blocks
