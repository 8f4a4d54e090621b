"""What the tests of the CUDA kernels share: the backend under test and where it runs (see conftest.py)."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from model.ops.cuda.backend import CudaOps
from model.ops.cuda.triton.common import INTERPRETED
from model.ops.interface import AttentionMetadata
from model.ops.reference import ReferenceOps
from tests.model.ops.cpu.harness import AttentionCase

CPU = torch.device("cpu")
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.bfloat16]
on_device = [
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
    # numpy warns where a device gives an infinity or a NaN, which the kernels expect.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@cache
def cuda_ops(dtype: torch.dtype) -> CudaOps:
    return CudaOps(DEVICE, dtype)


@cache
def reference_ops(dtype: torch.dtype) -> ReferenceOps:
    return ReferenceOps(CPU, dtype)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on(device: torch.device, case: AttentionCase) -> AttentionCase:
    """The case on a device; caches that are views of one tensor stay so."""
    keys, values = case.keys, case.values
    if keys.is_contiguous():
        keys, values = keys.to(device), values.to(device)
    else:
        both = torch.stack((keys, values), dim=1).to(device)
        keys, values = both[:, 0], both[:, 1]
    return AttentionCase(case.query.to(device), keys, values, metadata_on(device, case.metadata))


def metadata_on(device: torch.device, metadata: AttentionMetadata) -> AttentionMetadata:
    return replace(
        metadata,
        query_start=metadata.query_start.to(device),
        context_lens_tensor=metadata.context_lens_tensor.to(device),
        block_table=metadata.block_table.to(device),
        slot_mapping=metadata.slot_mapping.to(device),
    )
