"""The CPU backend: C++ kernels (model/ops/cpu/cpp) for AVX2 and AVX-512 behind the interface of ``Ops``.

Every kernel accumulates in float32 in an order that depends on the row alone, so a row's result is bit for
bit the same whatever else is in the batch and on any number of threads. Shapes that a kernel does not cover,
which no Gemma 3 has, fall back to the reference, which makes no such promise.
"""

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from model.config.tensors import LinearRole
from model.host.huge_pages import HugePageMemory
from model.ops.cpu.build import load_library
from model.ops.cpu.records import AttentionArguments, LayerArguments, RopeArguments, StepArguments
from model.ops.cpu.weights import (
    PackedWeight,
    WeightStorage,
    choose_storage,
    pack_head,
    pack_weight,
    put_together,
    take_apart,
)
from model.ops.interface import (
    AttentionMetadata,
    Candidates,
    LayerCache,
    LayerOperands,
    LinearWeight,
    PackedForm,
)
from model.ops.reference import ReferenceOps
from model.precision import cache_type


@dataclass(frozen=True, slots=True, eq=False)
class _Stack:
    """Arguments of ``decoder_layers`` that stay the same from step to step, for one network and its cache;
    keeps neither alive."""

    layers: Sequence[LayerOperands]
    keys: "weakref.ref[torch.Tensor]"  # address of the first layer's cache
    records: "ctypes.Array[LayerArguments]"  # one record for each layer
    room: tuple[int, int]  # elements per token of the two scratch buffers
    head_dim: int


class CpuOps(ReferenceOps):
    """Operations by fused C++ kernels. Raises BuildError where the kernels cannot be compiled or do not
    run."""

    def __init__(self, device: torch.device, dtype: torch.dtype, weights: WeightStorage = "exact") -> None:
        """``weights``: how linear weights are stored (``WeightStorage`` in model/ops/cpu/weights.py)."""
        super().__init__(device, dtype)
        self.weights = weights
        self._library = load_library()
        self._memory = HugePageMemory()
        self._stack: _Stack | None = None
        self._width = int(self._library.vector_width())
        self._is_bfloat16 = int(dtype == torch.bfloat16)

    @property
    def name(self) -> str:
        return f"cpu ({'AVX-512' if self._width == 16 else 'AVX2'}, {self.weights} weights)"

    @property
    def quantization(self) -> str:
        return self.weights if self.weights in ("int8", "int4") else "none"

    @property
    def cache_dtype(self) -> torch.dtype:
        compute = "bfloat16" if self._is_bfloat16 else "float32"
        kept = cache_type(compute, self.quantization, "cpu")
        return torch.bfloat16 if kept == "bfloat16" else torch.float32

    def empty_cache(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Allocate in huge pages as far as the system has them, because decodes read the cache from end to
        end."""
        cache = super().empty_cache(shape)
        self._library.advise_huge_pages(cache.data_ptr(), cache.nbytes)
        return cache

    # -- linear layers ---------------------------------------------------------------------------------------

    def pack_linear(self, weight: torch.Tensor, role: LinearRole, *, shared: bool = False) -> LinearWeight:
        assert weight.dtype == self.dtype
        storage = choose_storage(weight, self.weights, role)
        if role == "head":
            return pack_head(self._library, self._memory, weight, storage)
        return pack_weight(self._library, self._memory, weight, storage, may_be_int5=True)

    @property
    def stores_packed_weights(self) -> bool:
        return True

    def to_packed_form(self, weight: LinearWeight) -> PackedForm:
        assert isinstance(weight, PackedWeight)
        return take_apart(weight)

    def from_packed_form(self, form: PackedForm) -> LinearWeight:
        return put_together(form)

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        return self._linear(x, weight, x.dtype, self._is_bfloat16)

    def logits(self, x: torch.Tensor, head: LinearWeight) -> torch.Tensor:
        return self._linear(x, head, torch.float32, 0)

    def greedy(self, x: torch.Tensor, head: LinearWeight) -> torch.Tensor | None:
        assert isinstance(head, PackedWeight)
        if head.sketch is None:
            return None
        assert x.shape == (len(x), head.in_features)
        x = x.contiguous()
        token_ids = torch.empty(len(x), dtype=torch.int64)
        self._library.greedy(
            head.address,
            head.sketch.weight.address,
            head.sketch.spreads.data_ptr(),
            x.data_ptr(),
            self._is_bfloat16,
            len(x),
            token_ids.data_ptr(),
            torch.get_num_threads(),
        )
        return token_ids

    def _linear(
        self, x: torch.Tensor, weight: LinearWeight, dtype: torch.dtype, is_bfloat16: int
    ) -> torch.Tensor:
        assert isinstance(weight, PackedWeight)
        num_rows = x.shape[0]
        assert x.shape == (num_rows, weight.in_features)
        x = x.contiguous()
        result = torch.empty((num_rows, weight.out_features), dtype=dtype)
        self._library.linear(
            weight.address,
            x.data_ptr(),
            self._is_bfloat16,
            num_rows,
            result.data_ptr(),
            is_bfloat16,
            torch.get_num_threads(),
        )
        return result

    # -- elementwise -----------------------------------------------------------------------------------------

    def rms_norm(self, x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        result = torch.empty_like(x)
        size = x.shape[-1]
        self._library.rms_norm(
            x.data_ptr(),
            scale.data_ptr(),
            result.data_ptr(),
            x.numel() // size,
            size,
            eps,
            self._is_bfloat16,
            torch.get_num_threads(),
        )
        return result

    def norm_add_norm(
        self,
        branch: torch.Tensor,
        residual: torch.Tensor,
        post_scale: torch.Tensor,
        next_scale: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        assert residual.is_contiguous()
        assert branch.shape == residual.shape
        branch = branch.contiguous()
        result = torch.empty_like(branch)
        num_rows, size = branch.shape
        self._library.norm_add_norm(
            branch.data_ptr(),
            residual.data_ptr(),
            post_scale.data_ptr(),
            next_scale.data_ptr(),
            result.data_ptr(),
            num_rows,
            size,
            eps,
            self._is_bfloat16,
            torch.get_num_threads(),
        )
        return result

    def geglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        num_rows, double = gate_up.shape
        result = torch.empty((num_rows, double // 2), dtype=gate_up.dtype)
        self._library.geglu(
            gate_up.data_ptr(),
            result.data_ptr(),
            num_rows,
            double // 2,
            self._is_bfloat16,
            torch.get_num_threads(),
        )
        return result

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
        _, block_size, num_kv_heads, head_dim = k_cache.shape
        if head_dim % (2 * self._width):
            return super().qk_norm_rope_cache_write(
                qkv, q_scale, k_scale, cos, sin, k_cache, v_cache, slot_mapping, eps
            )
        qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
        num_tokens, size = qkv.shape
        num_heads = size // head_dim - 2 * num_kv_heads
        query = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype)
        record = RopeArguments(
            qkv=qkv.data_ptr(),
            q_scale=q_scale.data_ptr(),
            k_scale=k_scale.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            query=query.data_ptr(),
            slots=slot_mapping.data_ptr(),
            n=num_tokens,
            num_heads=num_heads,
            kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            **_cache_fields(k_cache, v_cache),
            is_bf16=self._is_bfloat16,
            threads=torch.get_num_threads(),
            eps=eps,
        )
        self._library.qk_norm_rope_cache_write(ctypes.byref(record))
        return query

    def paged_attention(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        num_tokens, num_heads, head_dim = query.shape
        if head_dim % (2 * self._width):
            return super().paged_attention(query, k_cache, v_cache, metadata, scale)
        query = query.contiguous()
        output = torch.empty((num_tokens, num_heads * head_dim), dtype=query.dtype)
        block_table = metadata.block_table
        record = AttentionArguments(
            query=query.data_ptr(),
            output=output.data_ptr(),
            block_table=block_table.data_ptr(),
            query_start=metadata.query_start.data_ptr(),
            context_lens=metadata.context_lens_tensor.data_ptr(),
            num_seqs=len(metadata.query_lens),
            table_stride=block_table.stride(0),
            block_size=metadata.block_size,
            num_heads=num_heads,
            kv_heads=k_cache.shape[2],
            head_dim=head_dim,
            **_cache_fields(k_cache, v_cache),
            window=metadata.window or 0,
            is_bf16=self._is_bfloat16,
            threads=torch.get_num_threads(),
            scale=scale,
        )
        self._library.paged_attention(ctypes.byref(record))
        return output

    def decoder_layers(
        self,
        layers: Sequence[LayerOperands],
        hidden: torch.Tensor,
        residual: torch.Tensor,
        rotary: Mapping[bool, tuple[torch.Tensor, torch.Tensor]],
        caches: Sequence[LayerCache],
        metadata: Mapping[bool, AttentionMetadata],
    ) -> bool:
        stack = self._stack
        if stack is None or stack.layers is not layers or stack.keys() is not caches[0].keys:
            stack = self._stack = self._stack_of(layers, caches, hidden.shape[1])
        num_tokens = len(hidden)
        if stack.head_dim % (2 * self._width):
            return False
        assert hidden.is_contiguous()
        assert residual.is_contiguous()
        first, second = (torch.empty(num_tokens, size, dtype=hidden.dtype) for size in stack.room)
        threads = torch.get_num_threads()

        def step_of(kind: bool) -> StepArguments:
            cos, sin = rotary[kind]
            batch = metadata[kind]
            assert cos.is_contiguous()
            assert sin.is_contiguous()
            return StepArguments(
                hidden=hidden.data_ptr(),
                residual=residual.data_ptr(),
                first=first.data_ptr(),
                second=second.data_ptr(),
                cos=cos.data_ptr(),
                sin=sin.data_ptr(),
                slots=batch.slot_mapping.data_ptr(),
                block_table=batch.block_table.data_ptr(),
                query_start=batch.query_start.data_ptr(),
                context_lens=batch.context_lens_tensor.data_ptr(),
                n=num_tokens,
                num_seqs=len(batch.query_lens),
                table_stride=batch.block_table.stride(0),
                block_size=batch.block_size,
                window=batch.window or 0,
                threads=threads,
            )

        steps = (StepArguments * 2)(step_of(False), step_of(True))  # indexed by is_global in the kernel
        self._library.decoder_layers(stack.records, len(layers), steps)
        return True

    def _stack_of(
        self, layers: Sequence[LayerOperands], caches: Sequence[LayerCache], hidden_size: int
    ) -> _Stack:
        records, room = [], [hidden_size, hidden_size]
        for layer, cache in zip(layers, caches, strict=True):
            weights = [
                cast(PackedWeight, weight)
                for weight in (layer.qkv, layer.attention_output, layer.gate_up, layer.down)
            ]
            records.append(
                LayerArguments(
                    *(weight.address for weight in weights),
                    q_scale=layer.q_norm.data_ptr(),
                    k_scale=layer.k_norm.data_ptr(),
                    post_attention=layer.post_attention_norm.data_ptr(),
                    pre_feedforward=layer.pre_feedforward_norm.data_ptr(),
                    post_feedforward=layer.post_feedforward_norm.data_ptr(),
                    next=layer.next_norm.data_ptr(),
                    **_cache_fields(cache.keys, cache.values),
                    hidden_size=hidden_size,
                    intermediate_size=layer.intermediate_size,
                    num_heads=layer.num_heads,
                    kv_heads=cache.keys.shape[2],
                    head_dim=cache.keys.shape[3],
                    is_global=layer.is_global,
                    is_bf16=self._is_bfloat16,
                    eps=layer.eps,
                    scale=layer.query_scale,
                )
            )
            query_size = layer.num_heads * cache.keys.shape[3]
            room[0] = max(room[0], weights[0].out_features, query_size, 2 * layer.intermediate_size)
            room[1] = max(room[1], query_size, layer.intermediate_size)
        keys = caches[0].keys
        return _Stack(
            layers,
            weakref.ref(keys),
            (LayerArguments * len(records))(*records),
            (room[0], room[1]),
            keys.shape[3],
        )

    # -- sampling --------------------------------------------------------------------------------------------

    def all_finite(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.contiguous()
        result = torch.empty(logits.shape[0], dtype=torch.bool)
        self._library.all_finite(logits.data_ptr(), *logits.shape, result.data_ptr(), torch.get_num_threads())
        return result

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.contiguous()
        result = torch.empty(logits.shape[0], dtype=torch.int64)
        self._library.argmax(logits.data_ptr(), *logits.shape, result.data_ptr(), torch.get_num_threads())
        return result

    def mask_rows(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        if not logits.is_contiguous():
            super().mask_rows(logits, rows, masks)
            return
        rows, masks = rows.contiguous(), masks.contiguous()
        pointers = logits.data_ptr(), rows.data_ptr()
        self._library.mask_rows(
            *pointers, len(rows), logits.shape[1], masks.data_ptr(), torch.get_num_threads()
        )

    def top_candidates(self, logits: torch.Tensor, k: int, temperature: torch.Tensor) -> Candidates:
        num_rows, size = logits.shape
        logits, temperature = logits.contiguous(), temperature.contiguous()
        values = torch.empty((num_rows, k), dtype=torch.float32)
        token_ids = torch.empty((num_rows, k), dtype=torch.int64)
        log_total = torch.empty(num_rows, dtype=torch.float32)
        self._library.top_candidates(
            logits.data_ptr(),
            num_rows,
            size,
            k,
            temperature.data_ptr(),
            values.data_ptr(),
            token_ids.data_ptr(),
            log_total.data_ptr(),
            torch.get_num_threads(),
        )
        return Candidates(values, token_ids, log_total)

    def draw(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        logits, temperature, min_p = logits.contiguous(), temperature.contiguous(), min_p.contiguous()
        top_p, uniform = top_p.contiguous(), uniform.contiguous()
        assert top_p.dtype == uniform.dtype == torch.float64
        result = torch.empty(logits.shape[0], dtype=torch.int64)
        self._library.draw(
            logits.data_ptr(),
            *logits.shape,
            temperature.data_ptr(),
            top_p.data_ptr(),
            min_p.data_ptr(),
            uniform.data_ptr(),
            result.data_ptr(),
            torch.get_num_threads(),
        )
        return result


def _cache_fields(keys: torch.Tensor, values: torch.Tensor) -> dict[str, int]:
    """The fields of the records that describe a layer's cache: addresses and strides."""
    k_block_stride, k_slot_stride = _strides(keys)
    v_block_stride, v_slot_stride = _strides(values)
    return {
        "k_cache": keys.data_ptr(),
        "v_cache": values.data_ptr(),
        "k_block_stride": k_block_stride,
        "k_slot_stride": k_slot_stride,
        "v_block_stride": v_block_stride,
        "v_slot_stride": v_slot_stride,
        "cache_is_bf16": int(keys.dtype == torch.bfloat16),
    }


def _strides(cache: torch.Tensor) -> tuple[int, int]:
    """The strides of blocks and of slots, in elements; the last two axes must be contiguous."""
    block, slot, head, element = cache.stride()
    assert element == 1
    assert head == cache.shape[3] or cache.shape[2] == 1
    return block, slot
