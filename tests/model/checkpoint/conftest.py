"""Tiny checkpoints of the same model in both formats, built on the spot."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from model.checkpoint.base import Checkpoint
from model.checkpoint.gguf_checkpoint import _LAYER as GGUF_LAYER_PARTS
from model.checkpoint.gguf_checkpoint import canonical_name as gguf_canonical_name
from model.checkpoint.open import open_checkpoint
from model.config.gemma3_config import Gemma3Config
from model.config.tensors import checkpoint_tensors

HF_CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 8,
    "query_pre_attn_scalar": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
}
CONFIG = Gemma3Config.from_hf(HF_CONFIG)

# 320 tokens: control, reserved, user defined (written as GGUF writes them), bytes, then letters and words
# with scores.
_WORDS = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "abc", "▁abc", "bc"]
TOKENS = (
    ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>", "<unused0>", "  ", "<i>"]
    + [f"<0x{value:02X}>" for value in range(256)]
    + _WORDS
    + [f"w{index}" for index in range(320 - 8 - 256 - len(_WORDS))]
)
TYPES = [3, 3, 3, 3, 3, 3, 4, 4] + [6] * 256 + [1] * (320 - 264)
SCORES = [-1000.0] * 8 + [0.0] * 256 + [-float(index) for index in range(320 - 264)]

GGUF_METADATA: dict[str, Any] = {
    "gemma3.context_length": 512,
    "gemma3.embedding_length": 64,
    "gemma3.block_count": 7,
    "gemma3.feed_forward_length": 96,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 2,
    "gemma3.attention.key_length": 32,
    "gemma3.attention.value_length": 32,
    "gemma3.attention.sliding_window": 8,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.rope.freq_base": 1e6,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": SCORES,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.unknown_token_id": 3,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.ggml.add_space_prefix": False,
}


def random_weights(config: Gemma3Config = CONFIG, seed: int = 0) -> dict[str, torch.Tensor]:
    """Canonical names, bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: torch.randn(spec.shape, generator=generator).mul_(0.1).bfloat16()
        for spec in checkpoint_tensors(config)
    }


def gguf_name(canonical: str) -> str:
    names = ["token_embd.weight", "output_norm.weight", "output.weight"]
    names += [f"blk.{layer}.{part}.weight" for layer in range(8) for part in GGUF_LAYER_PARTS]
    return {gguf_canonical_name(name): name for name in names}[canonical]


def write_gguf(
    path: Path,
    weights: Mapping[str, torch.Tensor],
    *,
    changes: Mapping[str, Any] | None = None,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    raw_names: bool = False,
) -> Path:
    """Norms get the 1 added, as GGUF stores them. A change to None leaves the key out."""
    writer = gguf.GGUFWriter(path, "gemma3")
    integers = gguf.GGUFValueType.UINT32
    for key, value in {**GGUF_METADATA, **(changes or {})}.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_key_value(key, value, integers)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in weights.items():
        array = tensor.float().numpy()
        stored = name if raw_names else gguf_name(name)
        if array.ndim == 1:
            writer.add_tensor(stored, array + np.float32(1.0))
        elif quantization == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(stored, array)
        else:
            writer.add_tensor(stored, gguf.quants.quantize(array, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    *,
    config: Mapping[str, Any] = HF_CONFIG,
    prefix: str = "",
    num_shards: int = 1,
    files: Mapping[str, Any] | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [{"id": 4, "content": "<end_of_turn>", "special": True}],
                "model": {},
            }
        )
    )
    named = {_prefixed(name, prefix): tensor.contiguous() for name, tensor in weights.items()}
    if num_shards == 1:
        save_file(named, folder / "model.safetensors")
    else:
        weight_map: dict[str, str] = {}
        for index in range(num_shards):
            shard = f"model-{index + 1:05}-of-{num_shards:05}.safetensors"
            part = dict(list(named.items())[index::num_shards])
            save_file(part, folder / shard)
            weight_map |= dict.fromkeys(part, shard)
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    for name, content in (files or {}).items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def _prefixed(name: str, prefix: str) -> str:
    """``prefix`` replaces "model." ("language_model.model." or "model.language_model.")."""
    if not prefix:
        return name
    if name == "lm_head.weight":
        return f"language_model.{name}" if prefix.startswith("language_model") else name
    return prefix + name.removeprefix("model.")


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return random_weights()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[Path], Checkpoint]]:
    """Opens a checkpoint with a cache of its own and closes it afterwards."""
    checkpoints: list[Checkpoint] = []

    def call(path: Path) -> Checkpoint:
        checkpoints.append(open_checkpoint(str(path), cache_dir=tmp_path / "cache", progress=False))
        return checkpoints[-1]

    yield call
    for checkpoint in checkpoints:
        checkpoint.close()
