"""Linear layers of a GPU with weights in 8 bits: int8 (weights alone, a scale per output) and fp8 (weights
and their inputs, a scale per output and per token; Ada, Hopper and later). The head stays as it is: its
errors would be the logits' own, and a tied one is the embedding's matrix, which stays anyway.

fp8 is torch's own product. For int8 torch has none that promises to beat bfloat16: few rows run a Triton
kernel where there is Triton (``QuantizedCudaOps`` in backend.py), all others multiply a widened copy. Chosen
on CUDA only, though what is here also runs on a CPU, for tests.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from model.config.tensors import LinearRole
from model.interface.errors import ConfigError
from model.ops.interface import LinearWeight
from model.ops.reference import ReferenceOps

Quantization = Literal["int8", "fp8"]
FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
FP8_ALIGNMENT = 16  # torch's product wants both sizes of a weight to be multiples of this
FP8_CAPABILITY = (8, 9)
SMALLEST_SCALE = 1e-12  # the scale of rows that are all zero
PACKED_ROWS = 4096  # rows quantised at once, so that no float32 copy of a whole weight exists


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """An int8 weight with a scale per output: weight[i, j] is data[i, j] * scales[i]."""

    data: torch.Tensor  # int8 [out_features, in_features]
    scales: torch.Tensor  # float32 [out_features]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        return self.data.to(dtype) * self.scales[:, None].to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """An fp8 weight (e4m3: 4 bits of exponent, 3 of mantissa, at most 448; Micikevicius et al. 2022) with a
    scale per output: weight[i, j] is data[i, j] * scales[i]."""

    data: torch.Tensor  # float8_e4m3fn [out_features, in_features]
    scales: torch.Tensor  # float32 [out_features]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes


def quantize_int8(weight: torch.Tensor) -> Int8Weight:
    """Round a weight [out_features, in_features] to int8 with a scale per row, its largest absolute value /
    127."""
    data = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for first in range(0, weight.shape[0], PACKED_ROWS):
        rows = weight[first : first + PACKED_ROWS].float()
        scale = (rows.abs().amax(dim=1) / 127).clamp_(min=SMALLEST_SCALE)
        scales[first : first + PACKED_ROWS] = scale
        data[first : first + PACKED_ROWS] = (rows / scale[:, None]).round_().to(torch.int8)
    return Int8Weight(data, scales)


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix [n, k] to fp8 with a scale per row, its largest absolute value / 448 -> (float8_e4m3fn
    [n, k], float32 [n])."""
    scales = (x.abs().amax(dim=1).float() / FP8_LARGEST).clamp_(min=SMALLEST_SCALE)
    # The conversion would make NaN of a quotient that rounding took past the largest number.
    return (x.float() / scales[:, None]).clamp_(-FP8_LARGEST, FP8_LARGEST).to(FP8), scales


def pack_fp8(weight: torch.Tensor) -> Fp8Weight:
    parts = [quantize_fp8(rows) for rows in torch.split(weight, PACKED_ROWS)]
    data = torch.cat([data.view(torch.uint8) for data, _ in parts]).view(FP8)
    return Fp8Weight(data, torch.cat([scales for _, scales in parts]))


def fp8_linear(x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    """Multiply x [n, in_features], rounded to fp8 with a scale per token, by the transposed weight -> [n,
    out_features] in x's dtype."""
    data, scales = quantize_fp8(x)
    return torch._scaled_mm(
        data, weight.data.t(), scale_a=scales[:, None], scale_b=weight.scales[None, :], out_dtype=x.dtype
    )


def check_fp8(dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Raises ConfigError where a CUDA device of this compute capability has no fp8 products of this dtype."""
    if capability < FP8_CAPABILITY:
        raise ConfigError(
            f"--quantization fp8 needs a GPU of compute capability {'.'.join(map(str, FP8_CAPABILITY))} or "
            f"later (Ada, Hopper); this one has {'.'.join(map(str, capability))}. Use int8 or none."
        )
    if dtype != torch.bfloat16:
        raise ConfigError(
            "--quantization fp8 computes in bfloat16. Use --dtype bfloat16, or another quantization."
        )


class QuantizedOps(ReferenceOps):
    """A backend whose linear layers keep their weights in 8 bits."""

    def __init__(self, device: torch.device, dtype: torch.dtype, quantization: Quantization) -> None:
        super().__init__(device, dtype)
        self._quantization = quantization
        if device.type == "cuda" and quantization == "fp8":
            check_fp8(dtype, torch.cuda.get_device_capability(device))

    @property
    def name(self) -> str:
        return f"{super().name} ({self._quantization} weights)"

    @property
    def quantization(self) -> str:
        return self._quantization

    def pack_linear(self, weight: torch.Tensor, role: LinearRole, *, shared: bool = False) -> LinearWeight:
        if role == "head":
            return super().pack_linear(weight, role, shared=shared)
        if self._quantization == "int8":
            return quantize_int8(weight)
        if weight.shape[0] % FP8_ALIGNMENT or weight.shape[1] % FP8_ALIGNMENT:
            return super().pack_linear(weight, role, shared=shared)
        return pack_fp8(weight)

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        if isinstance(weight, Fp8Weight):
            return fp8_linear(x, weight)
        if isinstance(weight, Int8Weight):
            return self.linear_int8(x, weight)
        return super().linear(x, weight)

    def linear_int8(self, x: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
        return F.linear(x, weight.widened(x.dtype))
