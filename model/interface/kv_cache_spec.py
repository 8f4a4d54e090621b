"""Sizes of the two-pool KV cache, by proof. The one place that knows how many blocks a sequence holds:
start-up, admission, allocation, recycling, ``gemserve info`` and the error for a request that can never fit
all call it. Imports no torch.

A block holds ``block_size`` (B) tokens of every layer of one group. The global group keeps every token. The
local group keeps what the sliding window (W tokens, the query itself included) can still reach, counted from
the last full block.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from model.interface.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Count = TypeVar("Count", "int", "npt.NDArray[np.int64]")  # of one sequence, or of each of many


def ceil_div(a: Count, b: int) -> Count:
    return -(-a // b)


def first_visible_key(position: int, window: int | None) -> int:
    """The position of the first key that a query at ``position`` reads: with a window of W tokens, which
    counts the query itself, keys s with position - W < s <= position."""
    return 0 if window is None else max(0, position - window + 1)


@dataclass(frozen=True, slots=True)
class BlockCount:
    """Blocks of each group."""

    global_blocks: int
    local_blocks: int


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """Sizes of both pools. The counts include each pool's null block (id 0), which holds no tokens."""

    num_global_blocks: int
    num_local_blocks: int
    global_bytes: int
    local_bytes: int
    capacity_tokens: int  # tokens that one sequence can hold at most, by the global pool


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape of the cache of one model. ``bytes_per_token_per_layer`` is 2 x kv_heads x head_dim x dtype
    size."""

    block_size: int
    sliding_window: int
    num_global_layers: int
    num_local_layers: int
    bytes_per_token_per_layer: int

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.sliding_window % self.block_size:
            raise ConfigError(
                f"--block-size {self.block_size} does not divide the model's sliding window of "
                f"{self.sliding_window} tokens; choose a divisor such as 8, 16, 32 or 64."
            )

    @property
    def global_block_bytes(self) -> int:
        return self.block_size * self.num_global_layers * self.bytes_per_token_per_layer

    @property
    def local_block_bytes(self) -> int:
        return self.block_size * self.num_local_layers * self.bytes_per_token_per_layer

    def first_local_block(self, num_computed_tokens: int) -> int:
        """Index of the first local block that a sequence with so many computed tokens keeps; all before it
        are recycled.

        The next queries stand at positions from ``num_computed_tokens`` on. Counted from the last full block,
        which may be a little earlier, so that the blocks that are full can be hit as a prefix.
        """
        last_full = num_computed_tokens - num_computed_tokens % self.block_size
        return first_visible_key(last_full, self.sliding_window) // self.block_size

    def global_blocks(self, num_tokens: Count) -> Count:
        """Blocks of the global group that hold so many tokens; of the local group too, the recycled ones
        included."""
        return ceil_div(num_tokens, self.block_size)

    def blocks(self, num_computed_tokens: int, num_new_tokens: int = 0) -> BlockCount:
        """Blocks that a sequence holds while ``num_new_tokens`` run on top of ``num_computed_tokens``.

        For num_computed_tokens >= W and B > 1 the local count is exactly W/B + ceil((n % B + c) / B).
        """
        total = self.global_blocks(num_computed_tokens + num_new_tokens)
        return BlockCount(total, total - self.first_local_block(num_computed_tokens))

    def local_pool_blocks(self, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Local blocks, null block included, that suffice for every step of every mix of sequences
        (docs/kv-cache.md)."""
        per_sequence = self.sliding_window // self.block_size + 2
        return 1 + max_num_seqs * per_sequence + ceil_div(max_num_batched_tokens, self.block_size)

    def sequence_bytes(self, num_tokens: int) -> int:
        """Bytes that one decoding sequence of so many tokens holds."""
        count = self.blocks(num_tokens - 1, 1)
        return count.global_blocks * self.global_block_bytes + count.local_blocks * self.local_block_bytes

    def uniform_sequence_bytes(self, num_tokens: int) -> int:
        """The same in a layout that keeps every token of every layer, for comparison."""
        return ceil_div(num_tokens, self.block_size) * (self.global_block_bytes + self.local_block_bytes)

    def plan(
        self,
        memory_bytes: int,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        prefix_caching: bool,
        setting: str = "--kv-cache-memory",
    ) -> KVCachePlan:
        """Split a budget: the proven local pool first, then the global pool, which alone drives admission.

        With prefix caching the local pool gets up to a quarter of the rest on top, so that recycled windows
        stay to be hit. Raises ConfigError, naming the flags, when the budget, which ``setting`` gives, is too
        small for one global block.
        """
        num_local = self.local_pool_blocks(max_num_seqs, max_num_batched_tokens)
        rest = memory_bytes - num_local * self.local_block_bytes
        smallest = 2 * self.global_block_bytes
        if rest < smallest:
            need = num_local * self.local_block_bytes + smallest
            raise ConfigError(
                f"{setting} gives the KV cache {memory_bytes} bytes, too few: {max_num_seqs} sequences with "
                f"a window of {self.sliding_window} tokens need at least {need} bytes. Raise {setting}, "
                "or lower --max-num-seqs or --max-num-batched-tokens."
            )
        if prefix_caching and self.local_block_bytes:
            extra = min(num_local - 1, rest // 4 // self.local_block_bytes)
            num_local += extra
            rest -= extra * self.local_block_bytes
        useful = 1 + max_num_seqs * ceil_div(max_model_len, self.block_size)
        if prefix_caching:
            useful *= 2
        num_global = min(useful, rest // self.global_block_bytes) if self.global_block_bytes else useful
        return self.plan_of_blocks(num_global, num_local)

    def plan_of_blocks(self, num_global: int, num_local: int) -> KVCachePlan:
        """Pools of so many blocks, their null blocks included."""
        return KVCachePlan(
            num_global_blocks=num_global,
            num_local_blocks=num_local,
            global_bytes=num_global * self.global_block_bytes,
            local_bytes=num_local * self.local_block_bytes,
            capacity_tokens=(num_global - 1) * self.block_size,
        )
