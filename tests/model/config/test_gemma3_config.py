"""Every spelling of a configuration gives the same frozen Gemma3Config; what is not understood is refused by
name."""

import dataclasses
from typing import Any

import pytest

from model.config.gemma3_config import SIZES, Gemma3Config
from model.config.tensors import parameter_count
from model.interface.errors import ConfigError

FLAT: dict[str, Any] = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 262_144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000,
    "rope_local_base_freq": 10_000,
    "hidden_activation": "gelu_pytorch_tanh",
    "eos_token_id": [1, 106],
}
LAYER_TYPES = ["full_attention" if layer in (5, 11, 17) else "sliding_attention" for layer in range(18)]

GGUF: dict[str, Any] = {
    "general.architecture": "gemma3",
    "gemma3.block_count": 18,
    "gemma3.context_length": 32_768,
    "gemma3.embedding_length": 640,
    "gemma3.feed_forward_length": 2048,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.value_length": 256,
    "gemma3.attention.sliding_window": 512,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.rope.freq_base": 1_000_000.0,
    "tokenizer.ggml.tokens": ["<pad>", "<eos>", "<bos>", *(f"t{i}" for i in range(3, 106)), "<end_of_turn>"]
    + ["x"] * (262_144 - 107),
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.bos_token_id": 2,
}


@pytest.mark.parametrize(
    "spelling",
    [
        {"layer_types": LAYER_TYPES},
        {"sliding_window_pattern": 6},
        {"_sliding_window_pattern": 6},
        {},
        {"layer_types": LAYER_TYPES, "sliding_window_pattern": 3},
    ],
    ids=["layer_types", "pattern", "_pattern", "neither", "layer_types wins"],
)
def test_every_spelling_of_the_layer_pattern_gives_the_270m(spelling: dict[str, Any]) -> None:
    assert Gemma3Config.from_hf({**FLAT, **spelling}) == SIZES["270m"]


def test_a_gguf_without_pattern_and_local_base_gives_the_270m() -> None:
    config = Gemma3Config.from_gguf(GGUF)
    assert [layer for layer, is_global in enumerate(config.global_layers) if is_global] == [5, 11, 17]
    assert config == SIZES["270m"]


@pytest.mark.parametrize(("eos", "eot"), [(1, None), (106, None), (1, 106)])
def test_the_stop_set_is_the_same_whatever_the_gguf_calls_eos(eos: int, eot: int | None) -> None:
    metadata = {**GGUF, "tokenizer.ggml.eos_token_id": eos}
    if eot is not None:
        metadata["tokenizer.ggml.eot_token_id"] = eot
    assert set(Gemma3Config.from_gguf(metadata).eos_token_ids) == {eos, 106}


def test_the_last_layers_are_a_prefix_of_the_pattern() -> None:
    globals_1b = [layer for layer, is_global in enumerate(SIZES["1b"].global_layers) if is_global]
    assert globals_1b == [5, 11, 17, 23]
    assert [size.num_global_layers for size in SIZES.values()] == [3, 4, 5, 8, 10]


SPARSE_4B = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "num_hidden_layers": 34,
    "sliding_window": 1024,
}
ROPE_4B = [
    {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {"rope_scaling": {"type": "linear", "factor": 8}},
    {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_type": "default"},
        }
    },
    {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        }
    },
]


@pytest.mark.parametrize("rope", ROPE_4B)
def test_a_sparse_nested_config_gets_the_published_defaults(rope: dict[str, Any]) -> None:
    raw = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": {**SPARSE_4B, **rope},
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    assert Gemma3Config.from_hf(raw) == SIZES["4b"]


def test_thetas_inside_rope_parameters_win() -> None:
    parameters = {
        "full_attention": {"rope_theta": 5e5, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
    }
    config = Gemma3Config.from_hf({**FLAT, "rope_parameters": parameters})
    assert (config.rope_theta, config.rope_local_theta, config.rope_scaling_factor) == (5e5, 2e4, 1.0)


def test_the_27b_gguf_has_a_query_scalar_of_168_and_linear_scaling() -> None:
    config = Gemma3Config.from_gguf(
        {
            **GGUF,
            "gemma3.block_count": 62,
            "gemma3.embedding_length": 5376,
            "gemma3.attention.head_count": 32,
            "gemma3.attention.head_count_kv": 16,
            "gemma3.attention.key_length": 128,
            "gemma3.attention.value_length": 128,
            "gemma3.rope.scaling.type": "linear",
            "gemma3.rope.scaling.factor": 8.0,
        }
    )
    assert (config.query_pre_attn_scalar, config.rope_scaling_factor) == (168.0, 8.0)


def test_parameter_counts_of_the_270m() -> None:
    assert parameter_count(SIZES["270m"], tied=True) == 268_098_176
    assert parameter_count(SIZES["270m"], tied=False) == 435_870_336


def test_bytes_per_token_of_the_270m_in_bfloat16() -> None:
    spec = SIZES["270m"].kv_cache_spec(block_size=16, dtype_size=2)
    assert spec.global_block_bytes == 16 * 3 * 1024
    assert (spec.num_global_layers, spec.num_local_layers, spec.sliding_window) == (3, 15, 512)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gemma2"}, "model_type"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_parameters"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "sliding_attention",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 18}, "layer_types"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "640"}, "hidden_size"),
        ({"head_dim": 255}, "head_dim"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id"),
        ({"eos_token_id": 262_144}, "token ids"),
        ({"sliding_window_pattern": 0}, "pattern"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Gemma3Config.from_hf({**FLAT, **change})


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("general.architecture", "llama", "llama"),
        ("gemma3.block_count", 10**6, "num_hidden_layers"),
        ("gemma3.rope.scaling.type", "yarn", "yarn"),
        ("gemma3.final_logit_softcapping", 30.0, "softcapping"),
        ("gemma3.attention.value_length", 128, "value_length"),
        ("gemma3.attention.head_count", 0, "num_attention_heads"),
        ("gemma3.attention.head_count", [4, 4], "head_count"),
        ("tokenizer.ggml.tokens", None, "tokens"),
    ],
)
def test_a_gguf_that_is_not_understood_is_refused_by_name(key: str, value: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Gemma3Config.from_gguf({**GGUF, key: value})


@pytest.mark.parametrize(
    "key",
    [
        key
        for key in GGUF
        if key.startswith("gemma3.") and "value_length" not in key and "freq_base" not in key
    ],
)
def test_a_missing_gguf_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        Gemma3Config.from_gguf({name: value for name, value in GGUF.items() if name != key})


def test_a_config_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SIZES["270m"].vocab_size = 1  # type: ignore[misc]
