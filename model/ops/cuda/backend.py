"""The CUDA backend: Triton kernels (model/ops/cuda/triton) behind the interface of ``Ops``, torch's own
matrix products.

What a CUDA graph may hold: every operation here, for a batch whose sequences all have one query (a decode
batch). Nothing waits for the device, and a launch depends on the shapes of the tensors, on ``window``,
``block_size`` and the number of entries of ``query_lens`` alone: neither ``context_lens`` on the host nor any
value on the device shapes it, so a graph captured with any contexts replays right for all others within the
width of its block table. Memory is torch's, so a graph's pool holds it. Kernels are compiled by the first
call of each shape, which has to come before the capture. A batch may be padded: a sequence whose
``context_lens_tensor`` is 0 attends to nothing and gets zeros, and a token whose slot is -1 writes nothing to
the cache.

The same kernels run on the CPU under Triton's interpreter, for tests: a ``CudaOps`` of the device "cpu" works
where TRITON_INTERPRET was 1 when they were imported.
"""

import torch

from model.interface.errors import ConfigError
from model.ops.cuda.quantized import Int8Weight, QuantizedOps
from model.ops.cuda.triton import elementwise, int8_linear, paged_attention, sampling
from model.ops.cuda.triton.common import INTERPRETED
from model.ops.cuda.triton.paged_attention import Device
from model.ops.interface import AttentionMetadata, Candidates, LinearWeight
from model.ops.reference import PlainWeight, ReferenceOps

# so few processors that some batches of the tests split their contexts and some do not
INTERPRETED_DEVICE = Device(num_processors=4, is_hopper=False)


class CudaOps(ReferenceOps):
    """Triton kernels on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Set up the device. Sets torch's matrix products of this process to sum in float32, and float32
        products to be exact (no TF32)."""
        super().__init__(device, dtype)
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            self.traits = Device.of(torch.cuda.get_device_properties(device))
        elif INTERPRETED:
            self.traits = INTERPRETED_DEVICE
        else:
            raise ConfigError(f"The CUDA kernels do not run on device {device}. Use --device cuda.")

    @property
    def name(self) -> str:
        return "cuda (Triton)"

    # -- linear layers ---------------------------------------------------------------------------------------

    def logits(self, x: torch.Tensor, head: LinearWeight) -> torch.Tensor:
        assert isinstance(head, PlainWeight)
        if x.is_cuda and x.dtype != torch.float32 and len(x):
            return torch.mm(x, head.tensor.t(), out_dtype=torch.float32)
        return super().logits(x, head)

    # -- elementwise -----------------------------------------------------------------------------------------

    def rms_norm(self, x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        return elementwise.rms_norm(x, scale, eps)

    def norm_add_norm(
        self,
        branch: torch.Tensor,
        residual: torch.Tensor,
        post_scale: torch.Tensor,
        next_scale: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        return elementwise.norm_add_norm(branch, residual, post_scale, next_scale, eps)

    def geglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return elementwise.geglu(gate_up)

    # -- attention -------------------------------------------------------------------------------------------

    def qk_norm_rope_cache_write(
        self,
        qkv: torch.Tensor,
        q_scale: torch.Tensor,
        k_scale: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        return elementwise.qk_norm_rope_cache_write(
            qkv, q_scale, k_scale, cos, sin, k_cache, v_cache, slot_mapping, eps
        )

    def paged_attention(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        return paged_attention.paged_attention(query, k_cache, v_cache, metadata, scale, self.traits)

    # -- sampling --------------------------------------------------------------------------------------------

    def all_finite(self, logits: torch.Tensor) -> torch.Tensor:
        return sampling.finite_and_likeliest(logits)[0]

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return sampling.finite_and_likeliest(logits)[1]

    def top_candidates(self, logits: torch.Tensor, k: int, temperature: torch.Tensor) -> Candidates:
        return sampling.top_candidates(logits, k, temperature)

    def draw(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        return sampling.draw(logits, temperature, top_p, min_p, uniform)


class QuantizedCudaOps(QuantizedOps, CudaOps):
    """Triton kernels on one device, with linear weights in 8 bits."""

    def linear_int8(self, x: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
        if x.shape[0] > int8_linear.MAX_ROWS:
            return super().linear_int8(x, weight)
        return int8_linear.int8_linear(x, weight.data, weight.scales, self.traits.num_processors)
