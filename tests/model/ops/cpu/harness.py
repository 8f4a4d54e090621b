"""What the tests of the CPU kernels share: the backend under test, and random paged caches whose unwritten
memory is NaN."""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from model.host.cpu_features import CPU_ISA_VARIABLE
from model.ops.cpu.backend import CpuOps
from model.ops.cpu.weights import WeightStorage
from model.ops.interface import AttentionMetadata
from model.ops.reference import ReferenceOps
from tests.model.ops.cpu.instruction_sets import instruction_sets

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
CACHED = [
    *((dtype, dtype) for dtype in DTYPES),
    (torch.float32, torch.bfloat16),
]  # types of activations and of the cache
needs_kernels = pytest.mark.skipif(not instruction_sets(), reason="needs g++ and a processor with AVX2")
# For a module of tests: each runs once for every instruction set.
every_instruction_set = [needs_kernels, pytest.mark.usefixtures("instruction_set")]
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # relative error of rounding once to the type


def cpu_ops(dtype: torch.dtype, weights: WeightStorage = "exact") -> CpuOps:
    """The backend over the kernels that are in use now."""
    return _cpu_ops(dtype, weights, os.environ.get(CPU_ISA_VARIABLE), os.environ.get("GEMSERVE_CPU_KERNELS"))


@cache
def _cpu_ops(
    dtype: torch.dtype, weights: WeightStorage, highest_isa: str | None, library: str | None
) -> CpuOps:
    return CpuOps(CPU, dtype, weights)


@cache
def reference_ops(dtype: torch.dtype) -> ReferenceOps:
    return ReferenceOps(CPU, dtype)


def random_case(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, in_features, generator=generator).to(dtype)
    return x, (torch.randn(out_features, in_features, generator=generator) * 0.05).to(dtype)


@dataclass
class AttentionCase:
    query: torch.Tensor  # [n, Hq, D]
    keys: torch.Tensor  # [num_blocks, B, Hkv, D]
    values: torch.Tensor
    metadata: AttentionMetadata

    def select(self, sequence: int, first_query: int, num_queries: int) -> "AttentionCase":
        """Some queries of one sequence alone, over the same cache, as if the later ones had not come yet."""
        whole = self.metadata
        start = int(whole.query_start[sequence]) + first_query
        context = whole.context_lens[sequence] - whole.query_lens[sequence] + first_query + num_queries
        metadata = metadata_of(
            whole.window,
            whole.block_size,
            (num_queries,),
            (context,),
            whole.block_table[sequence : sequence + 1].clone(),
        )
        return AttentionCase(
            self.query[start : start + num_queries].clone(), self.keys, self.values, metadata
        )


def metadata_of(
    window: int | None,
    block_size: int,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_table: torch.Tensor,
) -> AttentionMetadata:
    starts = [0]
    slots = []
    for i, (queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        starts.append(starts[-1] + queries)
        positions = torch.arange(context - queries, context)
        slots.append(block_table[i, positions // block_size].long() * block_size + positions % block_size)
    return AttentionMetadata(
        window=window,
        block_size=block_size,
        query_lens=tuple(query_lens),
        context_lens=tuple(context_lens),
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_lens_tensor=torch.tensor(context_lens, dtype=torch.int32),
        block_table=block_table,
        slot_mapping=torch.cat(slots),
    )


def attention_case(
    seed: int,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    window: int | None = None,
    block_size: int = 16,
    num_heads: int = 4,
    num_kv_heads: int = 1,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    interleaved: bool = False,
) -> AttentionCase:
    """Every slot that no query can see holds NaN: unwritten places, the null block, blocks recycled behind
    the window.

    ``interleaved``: keys and values lie in one tensor [num_blocks, 2, B, Hkv, D], so both caches are strided
    views.
    """
    generator = torch.Generator().manual_seed(seed)
    shuffle = random.Random(seed)
    blocks_of = [-(-context // block_size) for context in context_lens]
    ids = list(range(1, sum(blocks_of) + 3))
    shuffle.shuffle(ids)
    both = torch.full(
        (len(ids) + 1, 2, block_size, num_kv_heads, head_dim), torch.nan, dtype=cache_dtype or dtype
    )
    block_table = torch.zeros((len(query_lens), max(blocks_of) + 1), dtype=torch.int32)
    for i, (queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        low = 0 if window is None else max(0, context - queries - window + 1)
        for block in range(low // block_size, blocks_of[i]):
            block_table[i, block] = ids.pop()
        for position in range(low, context):
            place = (int(block_table[i, position // block_size]), slice(None), position % block_size)
            both[place] = torch.randn(2, num_kv_heads, head_dim, generator=generator).to(both.dtype)
    keys, values = both[:, 0], both[:, 1]
    if not interleaved:
        keys, values = keys.contiguous(), values.contiguous()
    query = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator).to(dtype)
    return AttentionCase(
        query, keys, values, metadata_of(window, block_size, query_lens, context_lens, block_table)
    )
