"""Gemma 3: the network, from token ids to the final hidden states and logits of a flat batch.

A decoder block is ``x = x + post_attention_norm(attention(input_norm(x)))``, then ``x = x +
post_feedforward_norm(mlp(pre_feedforward_norm(x)))``. Routing is static: local layers see a sliding window
and rotate with base 10 000, global layers see everything and rotate with base 1 000 000 and the model's
linear scale. Source: the Gemma 3 report (arXiv 2503.19786) and the module of the same name in transformers.
The arithmetic lives behind ``model/ops``.
"""

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import nn

from model.config.gemma3_config import Gemma3Config
from model.config.tensors import FINAL_NORM, HEAD, layer_linears, layer_tensors, model_tensors
from model.interface.errors import CheckpointError
from model.network.forward_batch import ForwardBatch
from model.network.kv_cache import KVCache
from model.network.layers import Embedding, Head, Linear, NormScale, RotaryEmbedding, WeightSlot
from model.ops.interface import AttentionMetadata, LayerCache, LayerOperands, LinearWeight, Ops, PackedForm

Rotary = tuple[torch.Tensor, torch.Tensor]  # cos, sin float32 [n, D / 2]


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys, over the paged cache."""

    def __init__(self, ops: Ops, config: Gemma3Config, layer: int) -> None:
        super().__init__()
        tensors, linears = layer_tensors(config, layer), layer_linears(config, layer)
        self.ops = ops
        self.eps = config.rms_norm_eps
        self.query_scale = config.query_pre_attn_scalar**-0.5
        self.num_heads = config.num_attention_heads
        self.qkv = Linear(ops, linears["qkv"])
        self.output = Linear(ops, linears["attention_output"])
        self.q_norm = NormScale(ops, tensors["self_attn.q_norm"])
        self.k_norm = NormScale(ops, tensors["self_attn.k_norm"])

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary, cache: LayerCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        query = self.ops.qk_norm_rope_cache_write(
            self.qkv(hidden),
            self.q_norm.scale,
            self.k_norm.scale,
            *rotary,
            cache.keys,
            cache.values,
            metadata.slot_mapping,
            self.eps,
        )
        attended = self.ops.paged_attention(query, cache.keys, cache.values, metadata, self.query_scale)
        return self.output(attended)  # type: ignore[no-any-return]


class MLP(nn.Module):
    """GeGLU: down(gelu_tanh(gate(x)) * up(x))."""

    def __init__(self, ops: Ops, config: Gemma3Config, layer: int) -> None:
        super().__init__()
        linears = layer_linears(config, layer)
        self.ops = ops
        self.gate_up = Linear(ops, linears["gate_up"])
        self.down = Linear(ops, linears["down"])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.ops.geglu(self.gate_up(hidden)))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """One decoder block. Where two sub-layers meet, one operation does the post-norm, the residual addition
    and the next sub-layer's norm."""

    def __init__(self, ops: Ops, config: Gemma3Config, layer: int) -> None:
        super().__init__()
        self.ops = ops
        self.eps = config.rms_norm_eps
        self.is_global = config.global_layers[layer]
        tensors = layer_tensors(config, layer)
        self.input_norm = NormScale(ops, tensors["input_layernorm"])
        self.attention = Attention(ops, config, layer)
        self.post_attention_norm = NormScale(ops, tensors["post_attention_layernorm"])
        self.pre_feedforward_norm = NormScale(ops, tensors["pre_feedforward_layernorm"])
        self.mlp = MLP(ops, config, layer)
        self.post_feedforward_norm = NormScale(ops, tensors["post_feedforward_layernorm"])

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        rotary: Rotary,
        cache: LayerCache,
        metadata: AttentionMetadata,
        next_norm: NormScale,
    ) -> torch.Tensor:
        """Run the block: ``hidden`` [n, h] is the normed ``residual`` [n, h], both in the compute dtype.
        Updates ``residual`` in place and returns it normed by ``next_norm``, [n, h]."""
        branch = self.attention(hidden, rotary, cache, metadata)
        hidden = self.ops.norm_add_norm(
            branch, residual, self.post_attention_norm.scale, self.pre_feedforward_norm.scale, self.eps
        )
        branch = self.mlp(hidden)
        return self.ops.norm_add_norm(
            branch, residual, self.post_feedforward_norm.scale, next_norm.scale, self.eps
        )

    def operands(self, next_norm: NormScale) -> LayerOperands:
        """Everything that this block multiplies by, for a backend that runs the block as a whole."""
        attention, mlp = self.attention, self.mlp
        return LayerOperands(
            qkv=cast(LinearWeight, attention.qkv.packed),
            attention_output=cast(LinearWeight, attention.output.packed),
            gate_up=cast(LinearWeight, mlp.gate_up.packed),
            down=cast(LinearWeight, mlp.down.packed),
            q_norm=attention.q_norm.scale,
            k_norm=attention.k_norm.scale,
            post_attention_norm=self.post_attention_norm.scale,
            pre_feedforward_norm=self.pre_feedforward_norm.scale,
            post_feedforward_norm=self.post_feedforward_norm.scale,
            next_norm=next_norm.scale,
            is_global=self.is_global,
            num_heads=self.attention.num_heads,
            intermediate_size=self.mlp.down.in_features,
            query_scale=self.attention.query_scale,
            eps=self.eps,
        )


class Gemma3(nn.Module):
    """The whole network on one device. Logits cover ids below ``num_valid_tokens`` only."""

    def __init__(self, config: Gemma3Config, ops: Ops, num_valid_tokens: int) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        self.embedding = Embedding(ops, config)
        self.layers = nn.ModuleList(
            DecoderLayer(ops, config, layer) for layer in range(config.num_hidden_layers)
        )
        self.final_norm = NormScale(ops, model_tensors(config)[FINAL_NORM])
        self.head = Head(ops, config, num_valid_tokens)
        self.operands: list[LayerOperands] = []  # one per layer; empty until the weights are loaded
        self.runs_whole_layers = True  # try Ops.decoder_layers before single operations
        angles = {
            False: (config.rope_local_theta, 1.0),
            True: (config.rope_theta, config.rope_scaling_factor),
        }
        self.rotary = RotaryEmbedding(config.head_dim, angles, ops.device)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Every tensor that the network needs, by its name in the checkpoint."""
        slots: dict[str, WeightSlot] = {}
        for owner in self.weight_owners().values():
            slots.update(owner.slots())
        if self.config.tie_word_embeddings:
            del slots[HEAD]
        return slots

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill the network from a stream, holding one tensor of it at a time. Raises CheckpointError, naming
        the tensor."""
        slots = self.weight_slots()
        for name, tensor in tensors:
            slot = slots.pop(name, None)
            if slot is None:
                raise CheckpointError(
                    f"Tensor {name} is unknown or appears twice; the checkpoint does not match "
                    "its config.json."
                )
            if tuple(tensor.shape) != slot.shape:
                raise CheckpointError(
                    f"Tensor {name} has shape {tuple(tensor.shape)}; the configuration wants {slot.shape}."
                )
            slot.fill(tensor)
        if slots:
            raise CheckpointError(
                f"Tensor {min(slots)} is missing from the checkpoint ({len(slots)} missing in all)."
            )
        if self.config.tie_word_embeddings:
            self.head.pack(self.embedding.weight, shared=True)
        self._collect_operands()

    def _collect_operands(self) -> None:
        self.operands = [
            layer.operands(norm) for layer, norm in zip(self.blocks, self.next_norms(), strict=True)
        ]

    def weight_owners(self) -> dict[str, Linear | NormScale | Embedding]:
        """Every block that owns weights, by its name in the network."""
        return {
            name: module
            for name, module in self.named_modules()
            if isinstance(module, Linear | NormScale | Embedding)
        }

    def packed_forms(self) -> dict[str, PackedForm]:
        """All weights of the loaded network as the backend keeps them, where it stores such."""
        return {name: owner.packed_form() for name, owner in self.weight_owners().items()}

    def restore_weights(self, forms: Mapping[str, PackedForm]) -> bool:
        """Fill the network with what ``packed_forms`` gave. False: they are of another network, and this one
        is as it was."""
        owners = self.weight_owners()
        if forms.keys() != owners.keys() or not all(
            owners[name].accepts(form) for name, form in forms.items()
        ):
            return False
        for name, form in forms.items():
            owners[name].restore(form)
        self._collect_operands()
        return True

    @property
    def blocks(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], list(self.layers))

    def next_norms(self) -> list[NormScale]:
        """The norm that follows each block: the next block's input norm, or the final norm."""
        return [layer.input_norm for layer in self.blocks[1:]] + [self.final_norm]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; a tied head counts only as far as the backend made a copy of it."""
        return sum(owner.nbytes for owner in self.weight_owners().values())

    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """Compute the normed final hidden states [n, h], in the compute dtype, of every token of the batch,
        and write their keys and values to the cache."""
        rotary = self.rotary(batch.positions)
        metadata = {True: batch.global_attention, False: batch.local_attention}
        layers = self.blocks
        residual = self.embedding(batch.token_ids)  # [n, h]
        hidden = self.ops.rms_norm(residual, layers[0].input_norm.scale, self.config.rms_norm_eps)
        if self.runs_whole_layers and self.ops.decoder_layers(
            self.operands, hidden, residual, rotary, cache.layers, metadata
        ):
            return hidden
        for layer, kept, next_norm in zip(layers, cache.layers, self.next_norms(), strict=True):
            kind = layer.is_global
            hidden = layer(hidden, residual, rotary[kind], kept, metadata[kind], next_norm)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits of final hidden states [r, h] -> float32 [r, num_valid_tokens]."""
        return self.head(hidden)  # type: ignore[no-any-return]

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Find the likeliest tokens of final hidden states [r, h] -> int64 [r], where the backend can without
        all logits (``Ops.greedy``)."""
        return self.head.greedy(hidden)
