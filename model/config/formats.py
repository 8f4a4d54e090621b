"""Reads the spellings that a Gemma 3 configuration comes in: Hugging Face ``config.json`` (flat or nested,
old and new keys) and GGUF metadata. Both give the same fields of ``Gemma3Config``. What is not understood is
refused with a ConfigError that names the key; nothing is guessed silently. A ``torch_dtype`` is not read: it
says how weights are stored, not how they are run. Imports no torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from model.interface.errors import ConfigError

DEFAULT_PATTERN = 6  # five local layers, then a global one
DEFAULT_ROPE_THETA = 1_000_000.0
DEFAULT_ROPE_LOCAL_THETA = 10_000.0

# What a sparse Hugging Face text_config leaves out (transformers' Gemma3TextConfig).
HF_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "rope_theta": DEFAULT_ROPE_THETA,
    "rope_local_base_freq": DEFAULT_ROPE_LOCAL_THETA,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
}

# Upper bounds far beyond every real size, so that a hostile header is refused before it makes anything loop
# or allocate.
LIMITS: Mapping[str, int] = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 16,
    "intermediate_size": 1 << 18,
    "num_hidden_layers": 512,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 1024,
    "sliding_window": 1 << 24,
    "max_position_embeddings": 1 << 24,
}

HF_MODEL_TYPES = ("gemma3_text", "gemma3")
HF_ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3TextModel")
GGUF_27B_BLOCK_COUNT = 62


def layer_pattern(num_hidden_layers: int, pattern: int) -> tuple[bool, ...]:
    """True for global layers: every ``pattern``-th one; a remainder is a prefix of the pattern, never an
    extra global layer."""
    if pattern < 1:
        raise ConfigError(f"The sliding window pattern must be at least 1, not {pattern}.")
    if not 1 <= num_hidden_layers <= LIMITS["num_hidden_layers"]:
        raise ConfigError(
            f"num_hidden_layers must lie in 1..{LIMITS['num_hidden_layers']}, not {num_hidden_layers}."
        )
    return tuple((layer + 1) % pattern == 0 for layer in range(num_hidden_layers))


def hf_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Gemma3Config from a ``config.json``."""
    _require_understood(raw)
    text: Mapping[str, Any] = raw
    outer_eos: Any = None
    if "text_config" in raw:
        nested = raw["text_config"]
        if not isinstance(nested, Mapping):
            raise ConfigError("text_config must be an object.")
        # Only these two are meaningful on the outer level of a multimodal config.
        outer_eos = raw.get("eos_token_id")
        outer_tie = raw.get("tie_word_embeddings")
        text = dict(nested) if outer_tie is None else {"tie_word_embeddings": outer_tie, **nested}
        _require_understood(text)
    fields = {**HF_DEFAULTS, **{key: value for key, value in text.items() if value is not None}}
    rope_theta, rope_local_theta, factor = _hf_rope(fields)
    eos = (
        *token_id_list(fields, "eos_token_id"),
        *token_id_list({"eos_token_id": outer_eos}, "eos_token_id"),
    )
    return {
        "vocab_size": integer(fields, "vocab_size"),
        "hidden_size": integer(fields, "hidden_size"),
        "intermediate_size": integer(fields, "intermediate_size"),
        "num_hidden_layers": integer(fields, "num_hidden_layers"),
        "num_attention_heads": integer(fields, "num_attention_heads"),
        "num_key_value_heads": integer(fields, "num_key_value_heads"),
        "head_dim": integer(fields, "head_dim"),
        "sliding_window": integer(fields, "sliding_window"),
        "global_layers": _hf_layers(fields),
        "rope_theta": rope_theta,
        "rope_local_theta": rope_local_theta,
        "rope_scaling_factor": factor,
        "query_pre_attn_scalar": number(fields, "query_pre_attn_scalar"),
        "rms_norm_eps": number(fields, "rms_norm_eps"),
        "max_position_embeddings": integer(fields, "max_position_embeddings"),
        "tie_word_embeddings": boolean(fields, "tie_word_embeddings"),
        "bos_token_id": integer(fields, "bos_token_id"),
        "pad_token_id": integer(fields, "pad_token_id"),
        "eos_token_ids": tuple(sorted(set(eos))),
    }


def gguf_fields(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Gemma3Config from GGUF metadata."""
    architecture = metadata.get("general.architecture")
    if architecture != "gemma3":
        raise ConfigError(f"general.architecture is {architecture!r}; only 'gemma3' is supported.")
    prefix = "gemma3."
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if metadata.get(prefix + key):
            raise ConfigError(
                f"{prefix}{key} is set; Gemma 3 has no soft-cap, so this file is not understood."
            )
    num_layers = integer(metadata, prefix + "block_count")
    heads = integer(metadata, prefix + "attention.head_count")
    hidden = integer(metadata, prefix + "embedding_length")
    head_dim = integer(metadata, prefix + "attention.key_length")
    if (
        integer(
            {
                "value_length": head_dim,
                **_renamed(metadata, prefix + "attention.value_length", "value_length"),
            },
            "value_length",
        )
        != head_dim
    ):
        raise ConfigError(f"{prefix}attention.value_length differs from key_length ({head_dim}).")
    optional = {
        "freq_base": DEFAULT_ROPE_THETA,
        "freq_base_swa": DEFAULT_ROPE_LOCAL_THETA,
        "scaling.factor": 1.0,
    }
    rope = {
        key: number({key: metadata.get(f"{prefix}rope.{key}", default)}, key)
        for key, default in optional.items()
    }
    scaling_type = metadata.get(
        prefix + "rope.scaling.type", "linear" if prefix + "rope.scaling.factor" in metadata else "none"
    )
    if scaling_type not in ("none", "linear"):
        raise ConfigError(
            f"{prefix}rope.scaling.type is {scaling_type!r}; only 'none' and 'linear' are supported."
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Sequence) or isinstance(tokens, str):
        raise ConfigError("tokenizer.ggml.tokens is missing or not a list of strings.")
    eos = {integer(metadata, key) for key in _GGUF_EOS_KEYS if key in metadata}
    if "<end_of_turn>" in tokens:
        eos.add(tokens.index("<end_of_turn>"))
    is_27b = num_layers == GGUF_27B_BLOCK_COUNT and heads > 0
    return {
        "vocab_size": len(tokens),
        "hidden_size": hidden,
        "intermediate_size": integer(metadata, prefix + "feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": integer(metadata, prefix + "attention.head_count_kv"),
        "head_dim": head_dim,
        "sliding_window": integer(metadata, prefix + "attention.sliding_window"),
        "global_layers": _gguf_layers(metadata.get(prefix + "attention.sliding_window_pattern"), num_layers),
        "rope_theta": rope["freq_base"],
        "rope_local_theta": rope["freq_base_swa"],
        "rope_scaling_factor": rope["scaling.factor"] if scaling_type == "linear" else 1.0,
        "query_pre_attn_scalar": hidden / heads if is_27b else float(head_dim),
        "rms_norm_eps": number(metadata, prefix + "attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": integer(metadata, prefix + "context_length"),
        "bos_token_id": integer({"bos": metadata.get("tokenizer.ggml.bos_token_id", 2)}, "bos"),
        "pad_token_id": integer({"pad": metadata.get("tokenizer.ggml.padding_token_id", 0)}, "pad"),
        "eos_token_ids": tuple(sorted(eos)),
    }


_GGUF_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def integer(fields: Mapping[str, Any], key: str) -> int:
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(
            f"{key} is missing." if value is None else f"{key} must be an integer, not {value!r:.80}."
        )
    return value


def number(fields: Mapping[str, Any], key: str) -> float:
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(
            f"{key} is missing." if value is None else f"{key} must be a number, not {value!r:.80}."
        )
    # an int too big for a float is refused by the range check
    return float(value) if abs(value) < 1e30 else float("inf")


def boolean(fields: Mapping[str, Any], key: str) -> bool:
    value = fields.get(key)
    if not isinstance(value, bool):
        raise ConfigError(f"{key} must be true or false, not {value!r:.80}.")
    return value


def token_id_list(fields: Mapping[str, Any], key: str) -> list[int]:
    """A key that holds one token id, a list of them, or nothing."""
    value = fields.get(key)
    values = [] if value is None else value if isinstance(value, list) else [value]
    return [integer({key: item}, key) for item in values]


def _renamed(metadata: Mapping[str, Any], key: str, name: str) -> dict[str, Any]:
    return {name: metadata[key]} if key in metadata else {}


def _require_understood(raw: Mapping[str, Any]) -> None:
    model_type = raw.get("model_type")
    if model_type is not None and model_type not in HF_MODEL_TYPES:
        raise ConfigError(
            f"model_type {model_type!r:.80} is not supported; supported are {', '.join(HF_MODEL_TYPES)}."
        )
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or any(name not in HF_ARCHITECTURES for name in architectures):
        raise ConfigError(
            f"architectures {architectures!r:.80} is not supported; "
            f"supported are {', '.join(HF_ARCHITECTURES)}."
        )
    if model_type is None and not architectures:
        raise ConfigError(
            "The configuration names neither model_type nor architectures, so the model is not known "
            "to be a Gemma 3."
        )
    for key in (
        "use_bidirectional_attention",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "attention_bias",
        "quantization_config",
    ):
        if raw.get(key):
            raise ConfigError(
                f"{key} is set to {raw[key]!r:.80}, which is not supported for Gemma 3 text models."
            )
    for key in ("hidden_activation", "hidden_act"):
        if raw.get(key) not in (None, "gelu_pytorch_tanh"):
            raise ConfigError(f"{key} {raw[key]!r:.80} is not supported; Gemma 3 uses 'gelu_pytorch_tanh'.")


def _hf_layers(fields: Mapping[str, Any]) -> tuple[bool, ...]:
    """layer_types wins, else sliding_window_pattern, else _sliding_window_pattern, else every sixth layer is
    global."""
    layer_types = fields.get("layer_types")
    if layer_types is None:
        key = next(
            (name for name in ("sliding_window_pattern", "_sliding_window_pattern") if name in fields), None
        )
        pattern = DEFAULT_PATTERN if key is None else integer(fields, key)
        return layer_pattern(integer(fields, "num_hidden_layers"), pattern)
    names = ("sliding_attention", "full_attention")
    if not isinstance(layer_types, list) or any(name not in names for name in layer_types):
        raise ConfigError(f"layer_types may hold only {' and '.join(names)}.")
    return tuple(name == "full_attention" for name in layer_types)


def _hf_rope(fields: Mapping[str, Any]) -> tuple[float, float, float]:
    """(global base, local base, factor of the global layers) of both spellings; a base inside rope_parameters
    wins."""
    theta, local_theta = number(fields, "rope_theta"), number(fields, "rope_local_base_freq")
    by_layer: dict[str, Mapping[str, Any]] = {"full_attention": {}, "sliding_attention": {}}
    for key in ("rope_scaling", "rope_parameters"):
        value = fields.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} must be an object.")
        if value and set(value) <= set(by_layer):
            by_layer.update({name: inner or {} for name, inner in value.items()})
        elif key == "rope_scaling" or not value:
            by_layer["full_attention"] = value
        else:
            raise ConfigError(
                "rope_parameters must be keyed by layer type (full_attention, sliding_attention)."
            )
    factors = {name: _rope_factor(inner, name) for name, inner in by_layer.items()}
    if factors["sliding_attention"] != 1.0:
        raise ConfigError("rope_parameters.sliding_attention: scaling of the local layers is not supported.")
    theta = number({"rope_theta": theta, **by_layer["full_attention"]}, "rope_theta")
    local_theta = number({"rope_theta": local_theta, **by_layer["sliding_attention"]}, "rope_theta")
    return theta, local_theta, factors["full_attention"]


def _rope_factor(parameters: Mapping[str, Any], name: str) -> float:
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"The RoPE parameters of {name} must be an object.")
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type not in ("default", "linear"):
        raise ConfigError(
            f"RoPE type {rope_type!r:.80} is not supported; supported are 'default' and 'linear'."
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("partial_rotary_factor is not supported; Gemma 3 rotates the whole head.")
    return number(parameters, "factor") if rope_type == "linear" else 1.0


def _gguf_layers(pattern: Any, num_layers: int) -> tuple[bool, ...]:
    """The published files hold no pattern. One that does holds a period, or a flag per layer that is true for
    local layers."""
    if pattern is None or isinstance(pattern, int):
        return layer_pattern(num_layers, DEFAULT_PATTERN if pattern is None else int(pattern))
    flags = [bool(flag) for flag in pattern]
    return tuple(not flag for flag in flags)
