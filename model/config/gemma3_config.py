"""The one frozen description of a Gemma 3 text model, and the published sizes. Every spelling of a
configuration (config_formats) is parsed into it once; what is not consistent is refused with a ConfigError
that names the field. Imports no torch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from model.config.formats import (
    DEFAULT_PATTERN,
    DEFAULT_ROPE_LOCAL_THETA,
    DEFAULT_ROPE_THETA,
    LIMITS,
    gguf_fields,
    hf_fields,
    layer_pattern,
)
from model.interface.errors import ConfigError
from model.interface.kv_cache_spec import KVCacheSpec


@dataclass(frozen=True)
class Gemma3Config:
    """Shape and constants of one model. RoPE scaling (linear, positions divided by the factor) holds on
    global layers only."""

    vocab_size: int  # rows of the embedding; may exceed the tokenizer's
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    sliding_window: int  # keys that a query of a local layer sees, itself included
    global_layers: tuple[bool, ...]  # per layer; True = full attention
    rope_theta: float = DEFAULT_ROPE_THETA  # base of the global layers
    rope_local_theta: float = DEFAULT_ROPE_LOCAL_THETA
    rope_scaling_factor: float = 1.0
    query_pre_attn_scalar: float = 256.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32_768
    tie_word_embeddings: bool = True
    bos_token_id: int = 2
    pad_token_id: int = 0
    eos_token_ids: tuple[int, ...] = (1, 106)

    def __post_init__(self) -> None:
        for name, limit in LIMITS.items():
            value = getattr(self, name)
            if not 1 <= value <= limit:
                raise ConfigError(f"{name} must lie in 1..{limit}, not {value}.")
        if len(self.global_layers) != self.num_hidden_layers:
            raise ConfigError(
                f"layer_types lists {len(self.global_layers)} layers, but num_hidden_layers is "
                f"{self.num_hidden_layers}."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple "
                f"of num_key_value_heads ({self.num_key_value_heads})."
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings, not {self.head_dim}.")
        for name in (
            "rope_theta",
            "rope_local_theta",
            "rope_scaling_factor",
            "query_pre_attn_scalar",
            "rms_norm_eps",
        ):
            value = getattr(self, name)
            if not 0.0 < value < 1e30:  # false for NaN too
                raise ConfigError(f"{name} must be a positive finite number, not {value}.")
        for token_id in (self.bos_token_id, self.pad_token_id, *self.eos_token_ids):
            if not 0 <= token_id < self.vocab_size:
                raise ConfigError(
                    f"The bos, pad and eos token ids must lie in 0..{self.vocab_size - 1}, not {token_id}."
                )

    @property
    def num_global_layers(self) -> int:
        return sum(self.global_layers)

    @property
    def num_local_layers(self) -> int:
        return self.num_hidden_layers - self.num_global_layers

    def kv_cache_spec(self, block_size: int, dtype_size: int) -> KVCacheSpec:
        """Sizes of the cache for a block of ``block_size`` tokens and elements of ``dtype_size`` bytes."""
        return KVCacheSpec(
            block_size=block_size,
            sliding_window=self.sliding_window,
            num_global_layers=self.num_global_layers,
            num_local_layers=self.num_local_layers,
            bytes_per_token_per_layer=2 * self.num_key_value_heads * self.head_dim * dtype_size,
        )

    def with_eos_token_ids(self, token_ids: Iterable[int]) -> "Gemma3Config":
        """The same model with these ids added to the ones that end a generation."""
        return replace(self, eos_token_ids=tuple(sorted({*self.eos_token_ids, *token_ids})))

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "Gemma3Config":
        """Parse ``config.json``: flat, or with the text model nested in ``text_config``."""
        return cls(**hf_fields(raw))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Gemma3Config":
        """Parse GGUF metadata. The vocabulary is the token list; a separate head is not known here
        (``tie_word_embeddings``).

        The file holds no query scalar: as in llama.cpp it is head_dim (256 on the published sizes), but
        hidden / heads = 168 on the 27B, recognised by its 62 blocks. Stop ids: eos, eot, eom keys and
        ``<end_of_turn>``.
        """
        return cls(**gguf_fields(metadata))


def _size(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int = 256,
    scalar: float = 256.0,
) -> Gemma3Config:
    small = hidden <= 1152  # 270M and 1B: text only, short context, short window, no RoPE scaling
    return Gemma3Config(
        vocab_size=262_144 if small else 262_208,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        sliding_window=512 if small else 1024,
        global_layers=layer_pattern(layers, DEFAULT_PATTERN),
        rope_scaling_factor=1.0 if small else 8.0,
        query_pre_attn_scalar=scalar,
        max_position_embeddings=32_768 if small else 131_072,
    )


SIZES: Mapping[str, Gemma3Config] = {
    "270m": _size(640, 2048, 18, 4, 1),
    "1b": _size(1152, 6912, 26, 4, 1),
    "4b": _size(2560, 10_240, 34, 8, 4),
    "12b": _size(3840, 15_360, 48, 16, 8),
    "27b": _size(5376, 21_504, 62, 32, 16, head_dim=128, scalar=168.0),
}
