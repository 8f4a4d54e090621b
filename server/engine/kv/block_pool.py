"""Blocks of one cache group: reference counts, the free queue and the hashes of cached content. Imports no
torch.

Every block but the null block (id 0) is in exactly one state: used (reference count > 0), cached (free, its
content still addressable by hash) or blank (free, no hash). Blank blocks are reused first, then cached ones,
least recently used first.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from model.interface.running_batch import NULL_BLOCK
from server.engine.stats import PoolStats


class BlockPool:
    """Owner of ``num_blocks`` blocks, the null block included."""

    def __init__(self, num_blocks: int, name: str) -> None:
        assert num_blocks >= 1, f"the {name} pool needs its null block"
        self.name = name
        self.num_blocks = num_blocks
        self.num_evicted = 0  # cached blocks whose content was given up for reuse
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._blank = list(range(num_blocks - 1, 0, -1))  # a stack; low ids first
        # insertion order is recency; a dict finds its first entry slowly
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: blank and cached."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, reference count 1 each. The caller has checked ``num_free``."""
        blank = self._blank
        if count <= len(blank):
            taken = blank[len(blank) - count :]
            taken.reverse()
            del blank[len(blank) - count :]
            for block in taken:
                self._ref_counts[block] = 1
            return taken
        assert count <= self.num_free, f"{self.name} pool: {count} blocks asked for, {self.num_free} free"
        blocks = []
        for _ in range(count):
            if blank:
                block = blank.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget_hash(block)
                self.num_evicted += 1
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def touch(self, block: int) -> None:
        """Add a reference to a block found by its hash."""
        if self._ref_counts[block] == 0:
            del self._cached[block]
        self._ref_counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Give back one reference each; null blocks are skipped. The first one freed is the first one
        reused."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            count = self._ref_counts[block] - 1
            assert count >= 0, f"{self.name} pool: block {block} freed twice"
            self._ref_counts[block] = count
            if count == 0:
                if self._hashes[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def cache_full_blocks(self, blocks: Sequence[int], content_hashes: Sequence[bytes]) -> None:
        """Make computed, used blocks findable. A second block of the same content stays private."""
        ref_counts, hashes, by_hash = self._ref_counts, self._hashes, self._by_hash
        for block, content_hash in zip(blocks, content_hashes, strict=True):
            assert ref_counts[block] > 0, f"{self.name} pool: block {block} is cached while nobody holds it"
            assert hashes[block] is None, f"{self.name} pool: block {block} is cached twice"
            if by_hash.setdefault(content_hash, block) == block:
                hashes[block] = content_hash

    def write_stats(self, stats: PoolStats, block_size: int) -> None:
        """Refresh the pool's numbers of now."""
        stats.cached, stats.free = len(self._cached), len(self._blank)
        stats.used = self.num_blocks - 1 - stats.cached - stats.free
        stats.evicted_total = self.num_evicted
        stats.capacity_tokens = self.num_usable * block_size

    def find(self, content_hash: bytes) -> int | None:
        return self._by_hash.get(content_hash)

    def num_free_among(self, blocks: Sequence[int]) -> int:
        """How many of these blocks count as free now (a touch would take them from the free queue)."""
        return sum(1 for block in blocks if self._ref_counts[block] == 0)

    def _forget_hash(self, block: int) -> None:
        content_hash = self._hashes[block]
        assert content_hash is not None
        del self._by_hash[content_hash]
        self._hashes[block] = None

    def check_idle(self) -> None:
        """Assert that every block is free, blank or cached under its own hash. Takes no time, whatever the
        size of the pool."""
        assert self.num_used == 0, f"{self.name} pool: blocks are held while nothing runs"
        assert len(self._by_hash) == len(self._cached), (
            f"{self.name} pool: a hash leads to a block that is not cached"
        )

    def check_invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that states partition the pool and reference counts equal the block tables' own count."""
        held = Counter(block for table in tables for block in table if block != NULL_BLOCK)
        blank, cached = set(self._blank), set(self._cached)
        assert len(blank) == len(self._blank), f"{self.name} pool: a block is twice in the free list"
        assert not blank & cached, f"{self.name} pool: a block is blank and cached"
        assert NULL_BLOCK not in blank | cached | set(held), (
            f"{self.name} pool: the null block was handed out"
        )
        for block in range(1, self.num_blocks):
            count = self._ref_counts[block]
            assert count == held[block], (
                f"{self.name} pool: block {block} has {count} references, tables hold {held[block]}"
            )
            assert (count == 0) == (block in blank or block in cached), (
                f"{self.name} pool: block {block} is lost"
            )
            content_hash = self._hashes[block]
            assert content_hash is None or self._by_hash.get(content_hash) == block, (
                f"{self.name} pool: stale hash"
            )
            assert block not in blank or content_hash is None, (
                f"{self.name} pool: blank block {block} has a hash"
            )
            assert block not in cached or content_hash is not None, (
                f"{self.name} pool: cached block {block} has no hash"
            )
        assert len(self._by_hash) == sum(h is not None for h in self._hashes), (
            f"{self.name} pool: hash index differs"
        )
