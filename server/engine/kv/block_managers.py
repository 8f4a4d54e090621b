"""The blocks of one layer group, by the rule of its kind of attention. Imports no torch.

The tables are those of the running batch, by row; a manager says which block of its pool stands where, and
for how long.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from model.interface.kv_cache_spec import KVCacheSpec
from model.interface.running_batch import NULL_BLOCK
from server.engine.kv.block_pool import BlockPool


class BlockManager:
    """What both kinds have in common."""

    def __init__(self, pool: BlockPool, tables: npt.NDArray[np.int32]) -> None:
        """``tables``: [row, index], a group's part of ``RunningBatch.blocks``."""
        self.pool = pool
        self._tables = tables

    def blocks_of(self, row: int, length: int) -> list[int]:
        """The first entries of a row's table."""
        blocks: list[int] = self._tables[row, :length].tolist()
        return blocks

    def free(self, row: int, length: int) -> None:
        """Give back a row's blocks. The last ones are reused first, so that shared beginnings live
        longest."""
        self.pool.free(reversed(self.blocks_of(row, length)))


class FullAttentionManager(BlockManager):
    """Of layers that see every token: a block stays until its request ends."""

    def longest_hit(self, content_hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix that the pool holds."""
        blocks = []
        for content_hash in content_hashes:
            block = self.pool.find(content_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks


class SlidingWindowManager(BlockManager):
    """Of layers with a window: a block goes back as soon as no query can reach it any more, and becomes the
    null block."""

    def __init__(self, pool: BlockPool, tables: npt.NDArray[np.int32], spec: KVCacheSpec) -> None:
        super().__init__(pool, tables)
        self.num_recycled = 0
        self.first_kept = [0] * len(tables)  # of each row: leading entries that are null
        self._spec = spec

    def longest_hit(self, content_hashes: Sequence[bytes], longest: int) -> int:
        """Number of blocks, at most ``longest``, of the longest prefix all of whose window the pool still
        holds."""
        count = index = longest
        while index > self._first_kept(count):
            index -= 1
            if self.pool.find(content_hashes[index]) is None:
                count = index  # any longer hit would need this block
        return count

    def window_before(self, content_hashes: Sequence[bytes], count: int) -> list[int]:
        """Blocks of the window before a prefix of ``count`` blocks that ``longest_hit`` has found."""
        blocks = [
            self.pool.find(content_hash) for content_hash in content_hashes[self._first_kept(count) : count]
        ]
        held = [block for block in blocks if block is not None]
        assert len(held) == len(blocks)
        return held

    def _first_kept(self, num_blocks: int) -> int:
        return self._spec.first_local_block(num_blocks * self._spec.block_size)

    def free_skipped_blocks(self, rows: Sequence[int], num_computed_tokens: Sequence[int]) -> None:
        """Give back what lies behind the windows of rows with so many computed tokens."""
        skipped_rows: list[int] = []
        skipped_indices: list[int] = []
        first_local_block, first_kept = self._spec.first_local_block, self.first_kept
        for row, num_computed in zip(rows, num_computed_tokens, strict=True):
            first, old = first_local_block(num_computed), first_kept[row]
            for index in range(old, first):
                skipped_rows.append(row)
                skipped_indices.append(index)
            first_kept[row] = max(first, old)
        if skipped_rows:
            entries = np.array(skipped_rows), np.array(skipped_indices)
            blocks = self._tables[entries].tolist()
            self._tables[entries] = NULL_BLOCK
            self.pool.free(blocks)
            self.num_recycled += len(blocks)
