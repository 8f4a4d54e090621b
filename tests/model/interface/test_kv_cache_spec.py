"""Which blocks of the cache a sequence keeps, against the keys that its queries read, one by one."""

import pytest

from model.interface.errors import ConfigError
from model.interface.kv_cache_spec import KVCacheSpec, first_visible_key


def spec_of(block_size: int, window: int) -> KVCacheSpec:
    return KVCacheSpec(
        block_size, window, num_global_layers=1, num_local_layers=5, bytes_per_token_per_layer=8
    )


def visible(position: int, window: int | None) -> list[int]:
    """Keys that a query reads: itself and those before, less than a window away."""
    return [key for key in range(position + 1) if window is None or position - key < window]


@pytest.mark.parametrize("window", [1, 4, 7, None])
def test_a_query_reads_from_the_first_key_in_its_window_on(window: int | None) -> None:
    for position in range(20):
        assert list(range(first_visible_key(position, window), position + 1)) == visible(position, window)


@pytest.mark.parametrize(("block_size", "window"), [(1, 4), (2, 8), (4, 4), (4, 8), (8, 16)])
def test_the_kept_tail_holds_all_that_later_queries_read_and_begins_no_earlier(
    block_size: int, window: int
) -> None:
    spec = spec_of(block_size, window)
    for num_computed in range(5 * window):
        first = spec.first_local_block(num_computed)
        last_full = num_computed // block_size * block_size
        read = {key // block_size for key in visible(last_full, window)}
        assert first == min(read), "of a query that follows the full blocks"
        later = {
            key
            for position in range(num_computed, num_computed + window)
            for key in visible(position, window)
        }
        assert first * block_size <= min(later)


@pytest.mark.parametrize(("block_size", "window"), [(2, 8), (4, 8), (16, 64)])
def test_blocks_are_those_of_the_proof(block_size: int, window: int) -> None:
    """docs/kv-cache.md: W/B + ceil((n mod B + c) / B) local blocks beyond a window, and the pool's bound."""
    spec = spec_of(block_size, window)
    for computed in range(window, 4 * window):
        for new in range(1, 3 * block_size):
            count = spec.blocks(computed, new)
            assert count.global_blocks == -(-(computed + new) // block_size)
            assert count.local_blocks == window // block_size + -(
                -(computed % block_size + new) // block_size
            )
            assert count.local_blocks < spec.local_pool_blocks(1, new)


def test_a_block_size_that_does_not_divide_the_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="--block-size 3 does not divide"):
        spec_of(3, 8)
