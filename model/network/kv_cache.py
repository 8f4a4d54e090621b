"""The tensors of the paged KV cache: a key and a value tensor per layer, sized by its group's pool in a
KVCachePlan.

Memory is not initialised: attention never reads a slot that was not written, and on a host unused blocks then
cost address space only. Which blocks belong to whom is decided elsewhere; block 0 of each pool is the null
block, never read, and written by nothing but rows that pad a batch.
"""

from collections.abc import Callable

import torch

from model.config.gemma3_config import Gemma3Config
from model.interface.kv_cache_spec import KVCachePlan
from model.ops.interface import LayerCache

Empty = Callable[[tuple[int, ...]], torch.Tensor]


class KVCache:
    """The keys and values of all layers."""

    def __init__(self, config: Gemma3Config, plan: KVCachePlan, block_size: int, empty: Empty) -> None:
        """Allocate the cache. ``empty`` makes a tensor of the given shape (``Ops.empty_cache``)."""

        def unwritten(num_blocks: int) -> torch.Tensor:
            return empty((num_blocks, block_size, config.num_key_value_heads, config.head_dim))

        pool_blocks = {True: plan.num_global_blocks, False: plan.num_local_blocks}
        self.block_size = block_size
        self.layers = [
            LayerCache(unwritten(pool_blocks[kind]), unwritten(pool_blocks[kind]))
            for kind in config.global_layers
        ]
