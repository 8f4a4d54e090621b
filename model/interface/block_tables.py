"""The block tables of all running sequences as one array, kept up to date as blocks come and go, so that a
step's batch takes rows of it instead of copying lists. No torch."""

import numpy as np
import numpy.typing as npt

NULL_BLOCK = 0
GLOBAL, LOCAL = 0, 1
FIRST_ROWS, FIRST_WIDTH = 8, 64


class BlockTableRows:
    """A row per sequence and group: block ids by position // block_size, and the null block where there is
    none."""

    def __init__(self) -> None:
        self.blocks: npt.NDArray[np.int32] = np.zeros(
            (2, FIRST_ROWS, FIRST_WIDTH), np.int32
        )  # [group, row, index]; grows
        self.step = 0
        # Entries set since the last step, of either group: row and index of each.
        self.changed_rows: list[int] = []
        self.changed_indices: list[int] = []
        self._free = list(range(FIRST_ROWS - 1, -1, -1))  # low ones first

    def next_step(self) -> None:
        """What changes from here on is not yet known to the runner, which has run a step."""
        self.step += 1
        self.changed_rows, self.changed_indices = [], []

    @property
    def num_taken(self) -> int:
        return len(self.blocks[GLOBAL]) - len(self._free)

    def take(self) -> int:
        """An empty row."""
        if not self._free:
            _, num_rows, width = self.blocks.shape
            self._free = list(range(2 * num_rows - 1, num_rows - 1, -1))
            self._grow(2 * num_rows, width)
        return self._free.pop()

    def append(self, row: int, first: int, global_blocks: list[int], local_blocks: list[int]) -> None:
        """Set a row's entries from index ``first`` on; as many of both groups."""
        end = first + len(global_blocks)
        _, num_rows, width = self.blocks.shape
        if width < end:
            while width < end:
                width *= 2
            self._grow(num_rows, width)
        if end == first + 1:  # as in most steps of a sequence that decodes, and several times faster
            self.blocks[GLOBAL, row, first] = global_blocks[0]
            self.blocks[LOCAL, row, first] = local_blocks[0]
        else:
            self.blocks[GLOBAL, row, first:end] = global_blocks
            self.blocks[LOCAL, row, first:end] = local_blocks
        self._note(row, first, end)

    def append_each(
        self, rows: list[int], indices: list[int], global_blocks: list[int], local_blocks: list[int]
    ) -> None:
        """``append`` of one block of each group to each of the rows."""
        width = max(indices) + 1
        if width > self.blocks.shape[2]:
            self._grow(self.blocks.shape[1], max(width, 2 * self.blocks.shape[2]))
        self.blocks[:, rows, indices] = (global_blocks, local_blocks)
        self.changed_rows += rows
        self.changed_indices += indices

    def recycle_each(self, rows: list[int], indices: list[int]) -> None:
        """``recycle`` of one entry of each of the rows."""
        self.blocks[LOCAL, rows, indices] = NULL_BLOCK
        self.changed_rows += rows
        self.changed_indices += indices

    def recycle(self, row: int, first: int, end: int) -> None:
        """Local entries [first, end) have become the null block."""
        if end == first + 1:
            self.blocks[LOCAL, row, first] = NULL_BLOCK
        else:
            self.blocks[LOCAL, row, first:end] = NULL_BLOCK
        self._note(row, first, end)

    def give_back(self, row: int, length: int) -> None:
        """Empty a row of ``length`` entries, to be taken by another sequence."""
        self.blocks[:, row, :length] = NULL_BLOCK
        self._free.append(row)

    def _note(self, row: int, first: int, end: int) -> None:
        if end == first + 1:
            self.changed_rows.append(row)
            self.changed_indices.append(first)
        else:
            self.changed_rows += [row] * (end - first)
            self.changed_indices += range(first, end)

    def _grow(self, num_rows: int, width: int) -> None:
        old = self.blocks
        self.blocks = np.zeros((2, num_rows, width), np.int32)
        self.blocks[:, : old.shape[1], : old.shape[2]] = old
