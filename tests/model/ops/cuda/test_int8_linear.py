"""The int8 linear kernel against the product of the same weights in float32: under Triton's interpreter, or
on a device."""

import pytest
import torch

from model.ops.cuda.quantized import Int8Weight, QuantizedOps, quantize_int8

pytest.importorskip("triton")

from model.ops.cuda.backend import QuantizedCudaOps
from model.ops.cuda.triton.common import INTERPRETED
from model.ops.cuda.triton.int8_linear import MAX_ROWS, int8_linear

DEVICE = torch.device("cpu" if INTERPRETED.value else "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda" and not torch.cuda.is_available(),
    reason="needs a CUDA device, or TRITON_INTERPRET=1",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_rows", "columns", "depth", "num_processors"),
    [
        (1, 64, 128, 1),  # one tile
        (3, 100, 72, 1),  # nothing whole
        (17, 130, 300, 1),
        (5, 64, 640, 4),  # split, the last part shorter
        (40, 65, 1100, 8),
        (70, 64, 128, 1),  # several tiles of rows
    ],
)
def test_the_product_of_what_is_kept(
    num_rows: int, columns: int, depth: int, num_processors: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(columns)
    weight = quantize_int8(
        torch.randn(columns, depth, generator=generator) * torch.logspace(-2, 1, columns)[:, None]
    )
    x = torch.randn(num_rows, depth, generator=generator).to(dtype)
    result = int8_linear(x.to(DEVICE), weight.data.to(DEVICE), weight.scales.to(DEVICE), num_processors).cpu()
    assert result.dtype == dtype
    kept = weight.data.double() * weight.scales.double()[:, None]
    expected = x.double() @ kept.t()
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20  # of the sum's terms
    assert ((result.double() - expected).abs() <= (x.double().abs() @ kept.abs().t()) * rounding).all()


def test_a_row_that_is_not_finite_stays_alone() -> None:
    weight = quantize_int8(torch.randn(64, 128))
    x = torch.randn(3, 128)
    x[1] = torch.nan
    result = int8_linear(x.to(DEVICE), weight.data.to(DEVICE), weight.scales.to(DEVICE), 1).cpu()
    assert result[1].isnan().all()
    assert result[[0, 2]].isfinite().all()


def test_few_rows_take_the_kernel_and_many_a_widened_copy() -> None:
    ops = QuantizedCudaOps(DEVICE, torch.float32, "int8")
    assert (ops.name, ops.quantization) == ("cuda (Triton) (int8 weights)", "int8")
    weight = ops.pack_linear(torch.randn(64, 128, device=DEVICE), "down")
    assert isinstance(weight, Int8Weight)
    x = torch.randn(MAX_ROWS + 1, 128, device=DEVICE)
    few, many = ops.linear(x[:4], weight), ops.linear(x, weight)
    assert torch.equal(few, int8_linear(x[:4], weight.data, weight.scales, ops.traits.num_processors))
    assert torch.equal(many, QuantizedOps.linear_int8(ops, x, weight))
    assert (few - many[:4]).abs().max() < 1e-4 * many.abs().max()
