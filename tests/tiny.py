"""A tiny random Gemma 3 in float32, in memory or as a Hugging Face folder with a tokenizer: for tests of the
whole path."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from model.config.gemma3_config import Gemma3Config
from model.execution.runner import ModelRunner
from model.interface.kv_cache_spec import KVCachePlan
from model.network.gemma3 import Gemma3
from model.ops.reference import ReferenceOps
from tests.server.text.small_tokenizer import build_library_tokenizer

WINDOW = 64
HF_CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def tiny_config(**changes: Any) -> Gemma3Config:
    return Gemma3Config.from_hf({**HF_CONFIG, **changes})


def tiny_tensors(seed: int = 0, **changes: Any) -> dict[str, torch.Tensor]:
    """Weights large enough that attention matters and the next token depends on far context."""
    generator = torch.Generator().manual_seed(seed)
    slots = Gemma3(
        tiny_config(**changes), ReferenceOps(torch.device("cpu"), torch.float32), 512
    ).weight_slots()
    scale = {"embed": 0.3, "norm": 0.2}
    return {
        name: torch.randn(slot.shape, generator=generator)
        * next((s for key, s in scale.items() if key in name), 0.15)
        for name, slot in slots.items()
    }


def tiny_runner(plan: KVCachePlan, block_size: int = 16) -> ModelRunner:
    ops = ReferenceOps(torch.device("cpu"), torch.float32)
    config = tiny_config()
    with torch.inference_mode():
        model = Gemma3(config, ops, config.vocab_size)
        model.load_weights(tiny_tensors().items())
    runner = ModelRunner(model, config.kv_cache_spec(block_size, 4), ops)
    runner.allocate_cache(plan)
    assert runner.cache is not None
    for layer in runner.cache.layers:  # memory that was never written must not matter
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    return runner


def write_tiny_folder(folder: Path, **changes: Any) -> Path:
    """A Hugging Face folder that the server loads like any other. ``changes`` are keys of its
    configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**HF_CONFIG, **changes}))
    save_file(
        {name: tensor.contiguous() for name, tensor in tiny_tensors(**changes).items()},
        folder / "model.safetensors",
    )
    build_library_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
