"""The cache of all running requests: prefix hits that hold in both layer groups, room for tokens, what is
full, what is freed.

Each group's own rule is its manager's (``block_managers.py``); sizes come from KVCacheSpec alone. Imports no
torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from model.interface.kv_cache_spec import KVCacheSpec
from model.interface.running_batch import GLOBAL, LOCAL, NULL_BLOCK, IntArray, RunningBatch
from server.engine.kv.announced_blocks import AnnouncedBlocks
from server.engine.kv.block_hashes import BlockHasher
from server.engine.kv.block_managers import FullAttentionManager, SlidingWindowManager
from server.engine.kv.block_pool import BlockPool
from server.engine.request import NO_ROW, Request
from server.engine.stats import EngineStats


@dataclass(slots=True)
class CachedRequest:
    """What the cache knows of a request, until that is forgotten."""

    hashes: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were needed
    num_cached_blocks: int = 0  # its leading blocks that others can find
    # hashes of blocks that it is going to compute, in order
    announced: list[bytes] = field(default_factory=list)
    # hash of the last block of its prefix that a running request is going to compute
    awaited_block: bytes | None = None


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A cached prefix, valid in both groups. ``pending``: the next block is being computed by a running
    request right now."""

    num_tokens: int
    global_blocks: list[int]
    local_blocks: list[int]  # the blocks that cover the window before num_tokens
    # "global" or "local": the pool that ended the hit; None: everything that may hit did
    limited_by: str | None
    pending: bool = False


class KVCacheManager:
    """Owner of both pools, and of all that stands in the block tables of the running batch."""

    def __init__(
        self,
        spec: KVCacheSpec,
        batch: RunningBatch,
        num_global_blocks: int,
        num_local_blocks: int,
        *,
        prefix_caching: bool,
    ) -> None:
        self.spec = spec
        self.batch = batch
        self.block_size = spec.block_size
        self.prefix_caching = prefix_caching
        self.full = FullAttentionManager(BlockPool(num_global_blocks, "global"), batch.blocks[GLOBAL])
        self.window = SlidingWindowManager(BlockPool(num_local_blocks, "local"), batch.blocks[LOCAL], spec)
        self._pools = (self.full.pool, self.window.pool)  # by layer group
        self._hasher = BlockHasher(spec.block_size)
        self._requests: dict[Request, CachedRequest] = {}
        self._announced = AnnouncedBlocks()

    @property
    def capacity_tokens(self) -> int:
        return self.global_pool.num_usable * self.block_size

    @property
    def num_known(self) -> int:
        """Requests that have not been forgotten."""
        return len(self._requests)

    @property
    def global_pool(self) -> BlockPool:
        return self.full.pool

    @property
    def local_pool(self) -> BlockPool:
        return self.window.pool

    def record(self, request: Request) -> CachedRequest:
        """What the cache knows of a request that has not been forgotten."""
        return self._requests.setdefault(request, CachedRequest())

    def block_hashes(self, request: Request, count: int) -> list[bytes]:
        """At least the first ``count`` of a request that has the tokens of as many blocks. The list is the
        record's own."""
        hashes = self.record(request).hashes
        self._hasher.extend(hashes, request.token_ids, request.spec.cache_salt, count)
        return hashes

    # -- admission -------------------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """Longest cached prefix of the request's tokens: a multiple of the block size, at most
        ``max_hit_tokens``.

        The global group must hold every block of it; the local group those covering ``[h - W + 1, h)``.
        """
        if not self.prefix_caching:
            return PrefixHit(0, [], [], None)
        limit = request.max_hit_tokens // self.block_size
        hashes = self.block_hashes(request, limit)
        global_blocks = self.full.longest_hit(hashes[:limit])
        longest = len(global_blocks)
        pending = longest < limit and hashes[longest] in self._announced
        self.record(request).awaited_block = (
            self._announced.last_of_run(hashes[longest:limit]) if pending else None
        )
        count = self.window.longest_hit(hashes, longest)
        local_blocks = self.window.window_before(hashes, count)
        limited_by = "local" if count < longest else "global" if longest < limit else None
        return PrefixHit(count * self.block_size, global_blocks[:count], local_blocks, limited_by, pending)

    def still_waits(self, request: Request) -> bool:
        """Whether ``get_computed_blocks`` would say pending again: cheap, for the many copies of one long
        prompt that wait in every step."""
        awaited = self.record(request).awaited_block
        return awaited is not None and awaited in self._announced

    def num_blocks_to_admit(self, hit: PrefixHit, num_tokens: int) -> int:
        """Free global blocks that admission takes away: new ones up to ``num_tokens``, and cached ones that
        the hit revives."""
        new = self.spec.blocks(num_tokens).global_blocks - len(hit.global_blocks)
        return new + self.global_pool.num_free_among(hit.global_blocks)

    def num_blocks_outstanding(self, request: Request) -> int:
        """Global blocks that a running request still needs for the tokens it already has."""
        return max(
            0, self.spec.blocks(request.num_tokens).global_blocks - int(self.batch.num_blocks[request.row])
        )

    def admit(self, request: Request, hit: PrefixHit) -> None:
        """Start the tables of a request's row with its hit: touches all hit blocks of both pools. Allocation
        follows."""
        record, row, count = self.record(request), request.row, len(hit.global_blocks)
        for block in hit.global_blocks:
            self.global_pool.touch(block)
        for block in hit.local_blocks:
            self.local_pool.touch(block)
        first = count - len(hit.local_blocks)
        self.window.first_kept[row] = first
        self.batch.set_row_blocks(row, hit.global_blocks, [NULL_BLOCK] * first + hit.local_blocks)
        record.num_cached_blocks = count
        if self.prefix_caching:
            full = request.num_tokens // self.block_size
            record.announced = self.block_hashes(request, full)[count:full]
            self._announced.announce(record.announced)

    # -- while it runs ---------------------------------------------------------------------------------------

    def allocate_slots(self, row: int, num_tokens: int) -> bool:
        """Give a row room for so many tokens in all. False when the global pool has too few blocks."""
        indices = np.arange(int(self.batch.num_blocks[row]), self.spec.global_blocks(num_tokens))
        return self._allocate(np.full(len(indices), row), indices)

    def append_blocks(self, rows: IntArray) -> bool:
        """Give each row one block more; every one of them or none. False when the global pool has too few."""
        return self._allocate(rows, self.batch.num_blocks[rows])

    def _allocate(self, rows: IntArray, indices: IntArray) -> bool:
        """New blocks for these entries of the tables, for all or for none."""
        count = len(rows)
        if count > self.global_pool.num_free:
            return False
        if count:
            # The local pool is sized so that this can't fail (KVCacheSpec.local_pool_blocks); allocate()
            # asserts it.
            local_blocks, global_blocks = self.local_pool.allocate(count), self.global_pool.allocate(count)
            self.batch.set_blocks(rows, indices, global_blocks, local_blocks)
        return True

    def cache_full_blocks(self, requests: Sequence[Request], num_computed_tokens: Sequence[int]) -> None:
        """After a step that brought the requests to so many computed tokens: make the blocks that are full
        now findable, then give back the local blocks behind the windows."""
        rows = [request.row for request in requests]
        if self.prefix_caching:
            self._cache(requests, num_computed_tokens)
        self.window.free_skipped_blocks(rows, num_computed_tokens)

    def _cache(self, requests: Sequence[Request], num_computed_tokens: Sequence[int]) -> None:
        rows: list[int] = []
        indices: list[int] = []
        hashes: list[bytes] = []
        block_size, extend = self.block_size, self._hasher.extend
        for request, num_computed in zip(requests, num_computed_tokens, strict=True):
            record = self._requests[request]
            full, cached = num_computed // block_size, record.num_cached_blocks
            if full > cached:
                extend(record.hashes, request.token_ids, request.spec.cache_salt, full)
                rows += [request.row] * (full - cached)
                indices += range(cached, full)
                hashes += record.hashes[cached:full]
                record.num_cached_blocks = full
                if record.announced:
                    self._withdraw(record, full - cached)
        if hashes:
            for pool, blocks in zip(self._pools, self.batch.blocks[:, rows, indices].tolist(), strict=True):
                pool.cache_full_blocks(blocks, hashes)

    # -- the end ---------------------------------------------------------------------------------------------

    def free(self, request: Request) -> None:
        """Give back everything a request holds, its row too."""
        row, record = request.row, self.record(request)
        length = int(self.batch.num_blocks[row])
        self.full.free(row, length)
        self.window.free(row, length)
        self.batch.remove(row)
        request.row = NO_ROW
        self._withdraw(record, len(record.announced))
        record.num_cached_blocks = 0

    def forget(self, request: Request) -> None:
        """The request has ended, and holds nothing."""
        assert request.row == NO_ROW
        self._requests.pop(request, None)

    def _withdraw(self, record: CachedRequest, count: int) -> None:
        """Take the first ``count`` of a request's blocks off the list of those being computed."""
        self._announced.withdraw(record.announced[:count])
        record.announced = record.announced[count:]

    # -- books -----------------------------------------------------------------------------------------------

    def write_stats(self, stats: EngineStats) -> None:
        stats.recycled_blocks_total = self.window.num_recycled
        for pool in self._pools:
            pool.write_stats(stats.pools[pool.name], self.block_size)

    def check_invariants(self, requests: Sequence[Request]) -> None:
        """Assert both pools' partition and reference counts, and that no table keeps a local block behind its
        window. ``requests``: all that have a row."""
        lengths = {request.row: int(self.batch.num_blocks[request.row]) for request in requests}
        assert len(lengths) == len(requests) == self.batch.num_taken, (
            "a row belongs to two requests, or to none"
        )
        global_tables = {row: self.full.blocks_of(row, length) for row, length in lengths.items()}
        local_tables = {row: self.window.blocks_of(row, length) for row, length in lengths.items()}
        self.global_pool.check_invariants(global_tables.values())
        self.local_pool.check_invariants(local_tables.values())
        for row, length in lengths.items():
            first = self.window.first_kept[row]
            assert NULL_BLOCK not in global_tables[row], "a global table has a hole"
            assert all(block == NULL_BLOCK for block in local_tables[row][:first])
            assert NULL_BLOCK not in local_tables[row][first:], "a local table has a hole inside the window"
            assert not self.batch.blocks[:, row, length:].any(), "a row is longer than its table"
        is_free = [row not in lengths for row in range(self.batch.num_rows)]
        assert not self.batch.blocks[:, is_free].any(), "a row that nobody has is not empty"
        if not requests:
            self.check_idle()

    def check_idle(self) -> None:
        """Assert that both pools are wholly free, as they must be when no request runs."""
        assert not self.batch.num_taken, "rows are taken while nothing runs"
        assert not self._announced, "blocks are announced while nothing runs"
        self.global_pool.check_idle()
        self.local_pool.check_idle()
