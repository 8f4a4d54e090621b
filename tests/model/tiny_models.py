"""Tiny random models for tests of the network: the committed checkpoints of tests/golden/tiny, and ones made
up in memory."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from model.checkpoint.open import open_checkpoint
from model.config.formats import layer_pattern
from model.config.gemma3_config import Gemma3Config
from model.network.gemma3 import Gemma3
from model.ops.interface import Ops
from model.ops.reference import ReferenceOps

TINY_FOLDER = Path(__file__).parent.parent / "golden" / "tiny"
TINY_NAMES = sorted(path.name for path in TINY_FOLDER.iterdir() if path.is_dir())

CONFIG = Gemma3Config(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=7,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    sliding_window=64,
    global_layers=layer_pattern(7, 6),
    query_pre_attn_scalar=16.0,
    max_position_embeddings=4096,
    eos_token_ids=(1,),
)


def reference_ops(dtype: torch.dtype = torch.float32) -> Ops:
    """The specification, whatever faster backend this machine has."""
    return ReferenceOps(torch.device("cpu"), dtype)


def load_tiny(name: str, ops: Ops | None = None) -> Gemma3:
    """A committed checkpoint in float32."""
    checkpoint = open_checkpoint(str(TINY_FOLDER / name), progress=False)
    with torch.inference_mode():
        model = Gemma3(checkpoint.config, ops or reference_ops(), checkpoint.config.vocab_size)
        model.load_weights(checkpoint.tensors())
    checkpoint.close()
    return model


def expected_logits(name: str) -> tuple[list[int], torch.Tensor]:
    """(token ids, logits [n, V]) as transformers computed them for a committed checkpoint."""
    expected = load_file(TINY_FOLDER / f"{name}.expected.safetensors")
    return expected["token_ids"].tolist(), expected["logits"]


def random_tensors(model: Gemma3, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights under which every part of the network matters."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, slot in sorted(model.weight_slots().items()):
        scale = (
            0.3
            if "norm" in name
            else 0.5
            if "embed" in name or "lm_head" in name
            else 1.5 * slot.shape[-1] ** -0.5
        )
        tensors[name] = torch.randn(slot.shape, generator=generator) * scale
    return tensors


def random_model(
    config: Gemma3Config = CONFIG, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Gemma3:
    with torch.inference_mode():
        model = Gemma3(config, reference_ops(dtype), config.vocab_size)
        model.load_weights(random_tensors(model, seed).items())
    return model


def all_local_config(num_layers: int = 1, window: int = 8) -> Gemma3Config:
    return replace(
        CONFIG, num_hidden_layers=num_layers, global_layers=(False,) * num_layers, sliding_window=window
    )


def random_prompt(length: int, vocab_size: int = CONFIG.vocab_size, seed: int = 0) -> list[int]:
    return torch.randint(
        3, vocab_size, (length,), generator=torch.Generator().manual_seed(seed + 1000 * length)
    ).tolist()
