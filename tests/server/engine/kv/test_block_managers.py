"""The rule of each kind of attention over its own group of blocks, and blocks that are announced."""

import numpy as np

from model.interface.kv_cache_spec import KVCacheSpec
from server.engine.kv.announced_blocks import AnnouncedBlocks
from server.engine.kv.block_managers import FullAttentionManager, SlidingWindowManager
from server.engine.kv.block_pool import BlockPool

SPEC = KVCacheSpec(4, 8, 1, 5, 8)
HASHES = [bytes([index]) for index in range(10)]


def full(num_blocks: int = 20) -> tuple[FullAttentionManager, np.ndarray]:
    tables = np.zeros((2, 10), np.int32)
    return FullAttentionManager(BlockPool(num_blocks, "global"), tables), tables


def window(num_blocks: int = 20) -> tuple[SlidingWindowManager, np.ndarray]:
    tables = np.zeros((2, 10), np.int32)
    return SlidingWindowManager(BlockPool(num_blocks, "local"), tables, SPEC), tables


def test_full_attention_hits_the_longest_unbroken_prefix() -> None:
    manager, tables = full()
    tables[0, :5] = manager.pool.allocate(5)
    manager.pool.cache_full_blocks(
        tables[0, [0, 1, 2, 4]].tolist(), [HASHES[0], HASHES[1], HASHES[2], HASHES[4]]
    )
    assert manager.longest_hit(HASHES) == tables[0, :3].tolist()
    assert manager.longest_hit(HASHES[3:]) == []
    manager.free(0, 5)
    assert manager.pool.num_free == manager.pool.num_usable
    assert manager.longest_hit(HASHES) == tables[0, :3].tolist(), "free, and findable until they are reused"


def test_the_last_blocks_of_a_row_are_reused_first() -> None:
    manager, tables = full(6)
    tables[0, :5] = manager.pool.allocate(5)
    manager.pool.cache_full_blocks(tables[0, :5].tolist(), HASHES[:5])
    manager.free(0, 5)
    manager.pool.allocate(2)
    assert len(manager.longest_hit(HASHES)) == 3


def test_a_window_hits_where_all_that_it_reaches_is_held() -> None:
    manager, tables = window()
    tables[0, :8] = manager.pool.allocate(8)
    manager.pool.cache_full_blocks(tables[0, 3:8].tolist(), HASHES[3:8])
    assert manager.longest_hit(HASHES, 8) == 8
    assert manager.window_before(HASHES, 8) == tables[0, 6:8].tolist()
    assert manager.longest_hit(HASHES, 5) == 5
    assert manager.longest_hit(HASHES, 4) == 0, "block 2 is in its window, and nobody holds it"
    assert manager.longest_hit(HASHES, 0) == 0


def test_what_the_window_has_left_is_given_back_at_once_and_of_each_row_on_its_own() -> None:
    manager, tables = window()
    for row in (0, 1):
        tables[row, :6] = manager.pool.allocate(6)
    before = tables.copy()
    manager.free_skipped_blocks([0, 1], [24, 13])
    for row, first in ((0, SPEC.first_local_block(24)), (1, SPEC.first_local_block(13))):
        assert manager.first_kept[row] == first
        assert not tables[row, :first].any()
        assert tables[row, first:].tolist() == before[row, first:].tolist()
    assert manager.num_recycled == manager.first_kept[0] + manager.first_kept[1] == 12 - manager.pool.num_used
    manager.free_skipped_blocks([0], [24])
    assert manager.pool.num_used == 12 - manager.num_recycled, "nothing is given back twice"
    for row in (0, 1):
        manager.free(row, 6)
    assert manager.pool.num_used == 0


def test_announced_blocks_are_counted_and_the_last_of_a_run_is_the_one_to_wait_for() -> None:
    announced = AnnouncedBlocks()
    announced.announce(HASHES[:4])
    announced.announce(HASHES[2:5])
    assert announced.last_of_run(HASHES[1:]) == HASHES[4]
    announced.withdraw(HASHES[:4])
    assert [content_hash in announced for content_hash in HASHES[:6]] == [
        False,
        False,
        True,
        True,
        True,
        False,
    ]
    announced.withdraw(HASHES[2:5])
    assert not announced
