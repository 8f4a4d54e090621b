"""The table of tensors of a Gemma 3 text model: one entry for each, with its name, its shape, what it is, and
how ranks divide it. Checkpoints are checked against it, the network is built from it, ranks take their part
by it, and bytes are counted with it. Names are those of Hugging Face's checkpoints. Imports no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from model.config.gemma3_config import Gemma3Config

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

# The linear weights of the network. Those of a decoder block that read the same inputs are one weight.
LinearRole = Literal["qkv", "attention_output", "gate_up", "down", "head"]
LAYER_ROLES: tuple[LinearRole, ...] = ("qkv", "attention_output", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class Split:
    """How the ranks of a tensor-parallel group divide a tensor: along one dimension, made of ``units`` that
    stay whole (heads, features, or rows of the vocabulary). Of fewer units than ranks, several ranks hold the
    same one."""

    dim: Literal[0, 1]  # 0: rows, which are output features; 1: columns, which are input features
    units: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor. ``role`` is the linear weight that it is, or that it is fused into, unless it is a norm or
    the embedding."""

    name: str
    shape: tuple[int, ...]  # of a linear weight: output features, input features
    role: Literal["embedding", "norm"] | LinearRole
    split: Split | None = None  # None: every rank holds all of it


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A linear weight of the network: the rows of its tensors, one after the other."""

    role: LinearRole
    pieces: tuple[TensorSpec, ...]

    @property
    def in_features(self) -> int:
        return self.pieces[0].shape[1]

    @property
    def out_features(self) -> int:
        return sum(piece.shape[0] for piece in self.pieces)


def layer_tensors(config: Gemma3Config, layer: int) -> dict[str, TensorSpec]:
    """The tensors of a decoder block by their name in it, fused ones in the order of their rows."""
    hidden, head_dim, features = config.hidden_size, config.head_dim, config.intermediate_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    queries, keys = heads * head_dim, kv_heads * head_dim
    tensors = (
        TensorSpec("input_layernorm", (hidden,), "norm"),
        TensorSpec("self_attn.q_proj", (queries, hidden), "qkv", Split(0, heads)),
        TensorSpec("self_attn.k_proj", (keys, hidden), "qkv", Split(0, kv_heads)),
        TensorSpec("self_attn.v_proj", (keys, hidden), "qkv", Split(0, kv_heads)),
        TensorSpec("self_attn.o_proj", (hidden, queries), "attention_output", Split(1, heads)),
        TensorSpec("self_attn.q_norm", (head_dim,), "norm"),
        TensorSpec("self_attn.k_norm", (head_dim,), "norm"),
        TensorSpec("post_attention_layernorm", (hidden,), "norm"),
        TensorSpec("pre_feedforward_layernorm", (hidden,), "norm"),
        TensorSpec("mlp.gate_proj", (features, hidden), "gate_up", Split(0, features)),
        TensorSpec("mlp.up_proj", (features, hidden), "gate_up", Split(0, features)),
        TensorSpec("mlp.down_proj", (hidden, features), "down", Split(1, features)),
        TensorSpec("post_feedforward_layernorm", (hidden,), "norm"),
    )
    return {spec.name: replace(spec, name=f"model.layers.{layer}.{spec.name}.weight") for spec in tensors}


def layer_linears(config: Gemma3Config, layer: int) -> dict[LinearRole, LinearSpec]:
    """The linear weights of a decoder block."""
    tensors = layer_tensors(config, layer).values()
    return {
        role: LinearSpec(role, tuple(spec for spec in tensors if spec.role == role)) for role in LAYER_ROLES
    }


@lru_cache(maxsize=8)
def model_tensors(config: Gemma3Config) -> Mapping[str, TensorSpec]:
    """All tensors by name, in the order of the network; the head too, where it is tied to the embedding."""
    vocabulary, hidden = config.vocab_size, config.hidden_size
    rows = Split(0, vocabulary)
    tensors = [
        TensorSpec(EMBEDDING, (vocabulary, hidden), "embedding", rows),
        *(
            spec
            for layer in range(config.num_hidden_layers)
            for spec in layer_tensors(config, layer).values()
        ),
        TensorSpec(FINAL_NORM, (hidden,), "norm"),
        TensorSpec(HEAD, (vocabulary, hidden), "head", rows),
    ]
    return MappingProxyType({spec.name: spec for spec in tensors})


def checkpoint_tensors(config: Gemma3Config) -> list[TensorSpec]:
    """The tensors that a checkpoint must have, in the order of the network: a tied head is none of them."""
    is_tied = config.tie_word_embeddings
    return [spec for spec in model_tensors(config).values() if not (spec.role == "head" and is_tied)]


def parameter_count(config: Gemma3Config, *, tied: bool) -> int:
    """Number of weights; with ``tied`` the head is the embedding matrix and counts once."""
    return sum(
        math.prod(spec.shape) for spec in model_tensors(config).values() if not (spec.role == "head" and tied)
    )
