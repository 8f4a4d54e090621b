"""The block tables of all running sequences as two matrices, kept up to date as blocks come and go, so that a step's batch takes
rows of them instead of copying lists. No torch."""

import numpy as np
import numpy.typing as npt

NULL_BLOCK = 0
FIRST_ROWS, FIRST_WIDTH = 8, 64


class BlockTableRows:
    """A row per sequence: block ids by position // block_size, and the null block where there is none. Both grow as needed."""

    def __init__(self) -> None:
        self.global_blocks: npt.NDArray[np.int32] = np.zeros((FIRST_ROWS, FIRST_WIDTH), np.int32)  # [rows, width]
        self.local_blocks: npt.NDArray[np.int32] = np.zeros((FIRST_ROWS, FIRST_WIDTH), np.int32)
        self._free = list(range(FIRST_ROWS - 1, -1, -1))  # low ones first

    @property
    def num_taken(self) -> int:
        return len(self.global_blocks) - len(self._free)

    def take(self) -> int:
        """An empty row."""
        if not self._free:
            num_rows, width = self.global_blocks.shape
            self._free = list(range(2 * num_rows - 1, num_rows - 1, -1))
            self._grow(2 * num_rows, width)
        return self._free.pop()

    def append(self, row: int, first: int, global_blocks: list[int], local_blocks: list[int]) -> None:
        """Set a row's entries from index ``first`` on; as many of both groups."""
        end = first + len(global_blocks)
        num_rows, width = self.global_blocks.shape
        if width < end:
            while width < end:
                width *= 2
            self._grow(num_rows, width)
        if end == first + 1:  # as in most steps of a sequence that decodes, and several times faster
            self.global_blocks[row, first] = global_blocks[0]
            self.local_blocks[row, first] = local_blocks[0]
        else:
            self.global_blocks[row, first:end] = global_blocks
            self.local_blocks[row, first:end] = local_blocks

    def recycle(self, row: int, first: int, end: int) -> None:
        """Local entries [first, end) have become the null block."""
        if end == first + 1:
            self.local_blocks[row, first] = NULL_BLOCK
        else:
            self.local_blocks[row, first:end] = NULL_BLOCK

    def give_back(self, row: int, length: int) -> None:
        """Empty a row of ``length`` entries, to be taken by another sequence."""
        self.global_blocks[row, :length] = NULL_BLOCK
        self.local_blocks[row, :length] = NULL_BLOCK
        self._free.append(row)

    def _grow(self, num_rows: int, width: int) -> None:
        for name in ("global_blocks", "local_blocks"):
            old = getattr(self, name)
            new = np.zeros((num_rows, width), np.int32)
            new[: old.shape[0], : old.shape[1]] = old
            setattr(self, name, new)
