"""Quantised GGUF blocks to float32. The ``gguf`` package knows every type; the four commonest have compiled
kernels too, which give the same bits about ten times faster and are what a start waits for. Without a
compiler the package does it all. Importing this module imports no torch."""

import ctypes
import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# float32 values the package expands at a time: temporaries of 512 KiB stay in the cache of the core
SLICE_ELEMENTS = 1 << 17
_FORMATS = {  # kFormats in model/ops/cpu/cpp/dequantize.cpp
    GGMLQuantizationType.Q8_0: 0,
    GGMLQuantizationType.Q5_0: 1,
    GGMLQuantizationType.Q4_K: 2,
    GGMLQuantizationType.Q6_K: 3,
}


@functools.cache
def _kernels() -> ctypes.CDLL | None:
    from model.ops.cpu.build import BuildError, load_library

    try:
        return load_library()
    except BuildError as error:
        logger.debug("dequantising without compiled kernels: %s", error)
        return None


def dequantize_rows(
    raw: NDArray[np.uint8], quantization: GGMLQuantizationType, columns: int, threads: ThreadPoolExecutor
) -> "tuple[torch.Tensor, bool]":
    """uint8 [rows, bytes of a row] -> float32 [rows, columns], and whether every value is finite."""
    import torch

    rows = raw.shape[0]
    kernels = _kernels() if quantization in _FORMATS else None
    if kernels is None:
        return _by_package(raw, quantization, columns, threads)
    result = torch.empty((rows, columns), dtype=torch.float32)
    source = np.ascontiguousarray(raw)
    not_finite = ctypes.c_int32(0)
    kernels.dequantize(
        source.ctypes.data,
        result.data_ptr(),
        rows * columns // GGML_QUANT_SIZES[quantization][0],
        _FORMATS[quantization],
        ctypes.addressof(not_finite),
        torch.get_num_threads(),
    )
    return result, not_finite.value == 0


def _by_package(
    raw: NDArray[np.uint8], quantization: GGMLQuantizationType, columns: int, threads: ThreadPoolExecutor
) -> "tuple[torch.Tensor, bool]":
    import torch

    result = torch.empty((raw.shape[0], columns), dtype=torch.float32)
    target = result.numpy()
    step = max(1, SLICE_ELEMENTS // columns)

    def fill(start: int) -> bool:
        block = package_dequantize(raw[start : start + step], quantization)
        target[start : start + step] = block
        return bool(np.isfinite(block).all())

    return result, all(threads.map(fill, range(0, raw.shape[0], step)))


def package_dequantize(raw: NDArray[np.uint8], quantization: GGMLQuantizationType) -> Any:
    """[rows, bytes of a row] -> [rows, columns] in float32. Damaged scales overflow silently; the caller
    checks."""
    with np.errstate(all="ignore"):
        return dequantize(raw, quantization)
