"""Both block tables of every running request: prefix hits, allocation, recycling behind the window,
publishing, freeing.

The global group keeps every token; the local group gives back, right after each step, what the sliding window
can no longer reach. Sizes come from KVCacheSpec alone. Imports no torch.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from model.interface.block_tables import NULL_BLOCK, BlockTableRows
from model.interface.kv_cache_spec import KVCacheSpec
from server.engine.kv.block_hashes import BlockHashes
from server.engine.kv.block_pool import BlockPool
from server.engine.request import Request
from server.engine.stats import EngineStats


@dataclass(slots=True)
class BlockTables:
    """Block ids by position // block_size. Recycled local entries are the null block."""

    global_blocks: list[int]
    local_blocks: list[int]
    row: int  # of KVCacheManager.rows, which has the same
    num_recycled: int = 0  # leading local entries that are null


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A cached prefix, valid in both groups. ``pending``: the next block is being computed by a running
    request right now."""

    num_tokens: int
    global_blocks: list[int]
    local_blocks: list[int]  # the blocks that cover the window before num_tokens
    limited_by: (
        str | None
    )  # "global" or "local": the pool that ended the hit; None: everything that may hit did
    pending: bool = False


class KVCacheManager:
    """Owner of both pools and of all block tables."""

    def __init__(
        self, spec: KVCacheSpec, num_global_blocks: int, num_local_blocks: int, *, prefix_caching: bool
    ) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        self.prefix_caching = prefix_caching
        self.global_pool = BlockPool(num_global_blocks, "global")
        self.local_pool = BlockPool(num_local_blocks, "local")
        self._hashes = BlockHashes(spec.block_size)
        self.tables: dict[str, BlockTables] = {}
        self.rows = BlockTableRows()
        self.num_recycled = 0
        self.num_admissions = 0  # of which each gives a request other blocks, and another row
        self._in_flight: Counter[bytes] = Counter()  # blocks that running requests are going to publish
        self._in_flight_of: dict[str, list[bytes]] = {}

    @property
    def capacity_tokens(self) -> int:
        return self.global_pool.num_usable * self.block_size

    def find_hit(self, request: Request) -> PrefixHit:
        """Longest cached prefix of the request's tokens: a multiple of the block size, at most
        ``max_hit_tokens``.

        The global group must hold every block of it; the local group those covering ``[h - W + 1, h)``.
        """
        if not self.prefix_caching:
            return PrefixHit(0, [], [], None)
        limit = request.max_hit_tokens // self.block_size
        hashes = self._hashes.of(request, limit)
        global_blocks: list[int] = []
        for content_hash in hashes[:limit]:
            block = self.global_pool.find(content_hash)
            if block is None:
                break
            global_blocks.append(block)
        longest = len(global_blocks)
        pending = longest < limit and hashes[longest] in self._in_flight
        request.awaited_block = self._last_in_flight(hashes[longest:limit]) if pending else None
        count = self._longest_local_hit(hashes, longest)
        first = self.spec.first_local_block(count * self.block_size)
        local_blocks = [self._find_local(content_hash) for content_hash in hashes[first:count]]
        limited_by = "local" if count < longest else "global" if longest < limit else None
        return PrefixHit(count * self.block_size, global_blocks[:count], local_blocks, limited_by, pending)

    def _last_in_flight(self, hashes: list[bytes]) -> bytes:
        """Of blocks that begin with one in flight, the last in an unbroken row of such: blocks of a sequence
        land in order."""
        for content_hash, following in pairwise(hashes):
            if following not in self._in_flight:
                return content_hash
        return hashes[-1]

    def still_waits(self, request: Request) -> bool:
        """Whether ``find_hit`` would say pending again: cheap, for the many copies of one long prompt that
        wait in every step."""
        return request.awaited_block is not None and request.awaited_block in self._in_flight

    def _longest_local_hit(self, hashes: list[bytes], longest: int) -> int:
        """Largest count <= longest such that every local block in [first_local_block(count * B), count) is
        held."""
        count = index = longest
        while index > self.spec.first_local_block(count * self.block_size):
            index -= 1
            if self.local_pool.find(hashes[index]) is None:
                count = index  # any longer hit would need this block
        return count

    def _find_local(self, content_hash: bytes) -> int:
        block = self.local_pool.find(content_hash)
        assert block is not None
        return block

    def num_blocks_to_admit(self, hit: PrefixHit, num_tokens: int) -> int:
        """Free global blocks that admission takes away: new ones up to ``num_tokens``, and cached ones that
        the hit revives."""
        new = self.spec.blocks(num_tokens).global_blocks - len(hit.global_blocks)
        return new + self.global_pool.num_free_among(hit.global_blocks)

    def num_blocks_outstanding(self, request: Request) -> int:
        """Global blocks that a running request still needs for the tokens it already has."""
        held = len(self.tables[request.request_id].global_blocks)
        return max(0, self.spec.blocks(request.num_tokens).global_blocks - held)

    def admit(self, request: Request, hit: PrefixHit) -> None:
        """Start a request's tables with its hit: touches all hit blocks of both pools. Allocation follows."""
        assert request.request_id not in self.tables
        self.num_admissions += 1
        for block in hit.global_blocks:
            self.global_pool.touch(block)
        for block in hit.local_blocks:
            self.local_pool.touch(block)
        num_blocks = len(hit.global_blocks)
        first = num_blocks - len(hit.local_blocks)
        tables = BlockTables(
            list(hit.global_blocks),
            [NULL_BLOCK] * first + hit.local_blocks,
            self.rows.take(),
            num_recycled=first,
        )
        self.rows.append(tables.row, 0, tables.global_blocks, tables.local_blocks)
        self.tables[request.request_id] = tables
        request.num_computed_tokens = request.num_slots = hit.num_tokens
        request.num_published_blocks = num_blocks
        if self.prefix_caching:
            full = request.num_tokens // self.block_size
            hashes = self._hashes.of(request, full)[num_blocks:full]
            self._in_flight_of[request.request_id] = hashes
            self._in_flight.update(hashes)

    def allocate(self, request: Request, num_new_tokens: int) -> bool:
        """Grow both tables to hold ``num_new_tokens`` more; all or nothing. False when the global pool has
        too few blocks."""
        tables = self.tables[request.spec.request_id]
        total = self.spec.global_blocks(request.num_computed_tokens + num_new_tokens)
        held = len(tables.global_blocks)
        num_new = total - held
        if num_new <= 0:
            return True
        if num_new > self.global_pool.num_free:
            return False
        # The local pool is sized so that this can't fail (KVCacheSpec.local_pool_blocks); allocate() asserts
        # it.
        local_blocks, global_blocks = self.local_pool.allocate(num_new), self.global_pool.allocate(num_new)
        self.rows.append(tables.row, held, global_blocks, local_blocks)
        tables.local_blocks += local_blocks
        tables.global_blocks += global_blocks
        request.num_slots = total * self.block_size
        return True

    def allocate_one_each(self, requests: Sequence[Request]) -> bool:
        """Grow the tables of each by one block; of all or of none."""
        count = len(requests)
        if count > self.global_pool.num_free:
            return False
        local_blocks, global_blocks = self.local_pool.allocate(count), self.global_pool.allocate(count)
        rows, indices = [], []
        for request, global_block, local_block in zip(requests, global_blocks, local_blocks, strict=True):
            tables = self.tables[request.spec.request_id]
            rows.append(tables.row)
            indices.append(len(tables.global_blocks))
            tables.global_blocks.append(global_block)
            tables.local_blocks.append(local_block)
            request.num_slots += self.block_size
        if rows:
            self.rows.append_each(rows, indices, global_blocks, local_blocks)
        return True

    def commit_each(self, requests: Sequence[Request]) -> None:
        """``commit`` of each, where the step's only token of each was the last one of a block. The same done
        together: this is a large part of what a step of hundreds of decodes costs."""
        rows, indices, recycled = [], [], []
        hashes, global_blocks, local_blocks = [], [], []
        size, in_flight, first_local_block = self.block_size, self._in_flight_of, self.spec.first_local_block
        for request in requests:
            request_id, num_computed = request.spec.request_id, request.num_computed_tokens
            index = num_computed // size - 1
            if request_id in in_flight or (self.prefix_caching and request.num_published_blocks != index):
                self.commit(request)
                continue
            tables = self.tables[request_id]
            if self.prefix_caching:
                hashes.append(self._hashes.of(request, index + 1)[index])
                global_blocks.append(tables.global_blocks[index])
                local_blocks.append(tables.local_blocks[index])
                request.num_published_blocks = index + 1
            first, old = first_local_block(num_computed), tables.num_recycled
            if first == old + 1:
                rows.append(tables.row)
                indices.append(old)
                recycled.append(tables.local_blocks[old])
                tables.local_blocks[old] = NULL_BLOCK
                tables.num_recycled = first
            elif first > old:
                self.commit(request)
        self.global_pool.publish(global_blocks, hashes)
        self.local_pool.publish(local_blocks, hashes)
        if rows:
            self.rows.recycle_each(rows, indices)
            self.local_pool.free(recycled)
            self.num_recycled += len(recycled)

    def commit(self, request: Request) -> None:
        """After a step: publish the blocks it filled, then recycle the local blocks behind the window."""
        tables = self.tables[request.spec.request_id]
        num_computed = request.num_computed_tokens
        if self.prefix_caching:
            full, published = num_computed // self.block_size, request.num_published_blocks
            if full > published:
                hashes = self._hashes.of(request, full)
                self.global_pool.publish(tables.global_blocks[published:full], hashes[published:full])
                self.local_pool.publish(tables.local_blocks[published:full], hashes[published:full])
                if request.spec.request_id in self._in_flight_of:
                    self._land(request.spec.request_id, full - published)
                request.num_published_blocks = full
        first = self.spec.first_local_block(num_computed)
        if first > tables.num_recycled:
            recycled = tables.local_blocks[tables.num_recycled : first]
            tables.local_blocks[tables.num_recycled : first] = [NULL_BLOCK] * len(recycled)
            self.rows.recycle(tables.row, tables.num_recycled, first)
            tables.num_recycled = first
            self.local_pool.free(recycled)
            self.num_recycled += len(recycled)

    def free(self, request: Request) -> None:
        """Give back everything a request holds. Its last blocks are reused first, so that shared beginnings
        live longest."""
        tables = self.tables.pop(request.request_id)
        self.rows.give_back(tables.row, len(tables.global_blocks))
        self.global_pool.free(reversed(tables.global_blocks))
        self.local_pool.free(reversed(tables.local_blocks))
        self._land(request.request_id, None)
        request.num_published_blocks = request.num_slots = 0

    def _land(self, request_id: str, count: int | None) -> None:
        """Take the first ``count`` (None: all) of a request's blocks off the list of those being computed."""
        hashes = self._in_flight_of.get(request_id)
        if hashes is None:
            return
        landed = hashes if count is None else hashes[:count]
        for content_hash in landed:
            self._in_flight[content_hash] -= 1
            if self._in_flight[content_hash] <= 0:
                del self._in_flight[content_hash]
        rest = hashes[len(landed) :]
        if rest:
            self._in_flight_of[request_id] = rest
        else:
            del self._in_flight_of[request_id]

    def write_stats(self, stats: EngineStats) -> None:
        stats.recycled_blocks_total = self.num_recycled
        for pool in (self.global_pool, self.local_pool):
            pool.write_stats(stats.pools[pool.name], self.block_size)

    def check_invariants(self) -> None:
        """Assert both pools' partition and reference counts, and that no table keeps a local block behind its
        window."""
        self.global_pool.check_invariants(tables.global_blocks for tables in self.tables.values())
        self.local_pool.check_invariants(tables.local_blocks for tables in self.tables.values())
        for tables in self.tables.values():
            assert NULL_BLOCK not in tables.global_blocks, "a global table has a hole"
            assert all(block == NULL_BLOCK for block in tables.local_blocks[: tables.num_recycled])
            assert NULL_BLOCK not in tables.local_blocks[tables.num_recycled :], (
                "a local table has a hole inside the window"
            )
            length = len(tables.global_blocks)
            assert len(tables.local_blocks) == length
            for rows, blocks in zip(
                self.rows.blocks[:, tables.row], (tables.global_blocks, tables.local_blocks), strict=True
            ):
                assert rows[:length].tolist() == blocks, "the row of a table differs from it"
                assert not rows[length:].any(), "a row is longer than its table"
        taken = {tables.row for tables in self.tables.values()}
        assert len(taken) == len(self.tables) == self.rows.num_taken, (
            "a row belongs to two tables, or to none"
        )
        if not self.tables:
            self.check_idle()

    def check_idle(self) -> None:
        """Assert that both pools are wholly free, as they must be when no request runs."""
        assert not self._in_flight, "blocks are announced while nothing runs"
        assert not self._in_flight_of
        self.global_pool.check_idle()
        self.local_pool.check_idle()
