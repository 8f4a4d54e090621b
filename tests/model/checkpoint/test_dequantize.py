"""The compiled dequantisers give the bits of the gguf package, and see every value that is not finite."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from model.checkpoint import dequantize as module
from model.checkpoint.dequantize import dequantize_rows, package_dequantize

Q = GGMLQuantizationType
SCALES = {
    Q.Q8_0: (0,),
    Q.Q5_0: (0,),
    Q.Q4_K: (0, 2),
    Q.Q6_K: (208,),
}  # where the half-precision scales of a block lie


def random_blocks(quantization: GGMLQuantizationType, rows: int, blocks_per_row: int) -> NDArray[np.uint8]:
    """Any bytes are a valid block; only the scales are kept finite."""
    generator = np.random.default_rng(0)
    elements, num_bytes = GGML_QUANT_SIZES[quantization]
    assert elements in (32, 256)
    raw = generator.integers(0, 256, (rows * blocks_per_row, num_bytes), dtype=np.uint8)
    for offset in SCALES[quantization]:
        scale = generator.normal(size=len(raw)).astype(np.float16)
        raw[:, offset : offset + 2] = scale.view(np.uint8).reshape(-1, 2)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("quantization", list(SCALES))
@pytest.mark.parametrize(("rows", "blocks_per_row"), [(1, 1), (3, 5), (700, 4)])
def test_the_same_bits_as_the_package(
    quantization: GGMLQuantizationType, rows: int, blocks_per_row: int
) -> None:
    if module._kernels() is None:
        pytest.skip("no C++ compiler: the package does it all")
    raw = random_blocks(quantization, rows, blocks_per_row)
    columns = blocks_per_row * GGML_QUANT_SIZES[quantization][0]
    with ThreadPoolExecutor(1) as threads:
        got, is_finite = dequantize_rows(raw, quantization, columns, threads)
    assert is_finite
    assert np.array_equal(got.numpy().view(np.uint32), package_dequantize(raw, quantization).view(np.uint32))


@pytest.mark.parametrize("quantization", list(SCALES))
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_seen(quantization: GGMLQuantizationType, value: float) -> None:
    raw = random_blocks(quantization, 5, 4)
    offset = SCALES[quantization][0]
    raw[3, offset : offset + 2] = np.array([value], dtype=np.float16).view(np.uint8)
    with ThreadPoolExecutor(1) as threads:
        assert not dequantize_rows(raw, quantization, 4 * GGML_QUANT_SIZES[quantization][0], threads)[1]


def test_without_kernels_the_package_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks(Q.Q6_K, 5, 4)
    with ThreadPoolExecutor(1) as threads:
        expected, _ = dequantize_rows(raw, Q.Q6_K, 1024, threads)
        monkeypatch.setattr(module, "_kernels", lambda: None)
        got, is_finite = dequantize_rows(raw, Q.Q6_K, 1024, threads)
    assert is_finite
    assert np.array_equal(got.numpy(), expected.numpy())
