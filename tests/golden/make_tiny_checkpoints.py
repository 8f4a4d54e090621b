"""Makes the tiny random Gemma 3 checkpoints in tests/golden/tiny and their expected logits, with transformers
in float32.

Run by hand, in an environment with torch, transformers and safetensors: ``python
tests/golden/make_tiny_checkpoints.py``. The outputs are committed, and nothing in the test suite imports this
file. Every case is a folder as published checkpoints look (config.json in one of the spellings in
circulation, model.safetensors) and, beside it, ``<name>.expected.safetensors`` with the token ids of a prompt
and the logits at every position.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

FOLDER = Path(__file__).parent / "tiny"
PROMPT_LENGTH = 41  # several windows of 8, and no multiple of a block size

BASE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "hidden_activation": "gelu_pytorch_tanh",
}
OLD_ROPE = {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}
LINEAR_8 = {"rope_type": "linear", "factor": 8.0}


def layer_types(depth: int, pattern: int) -> list[str]:
    return ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(depth)]


@dataclass
class Case:
    name: str
    shape: dict[str, Any] = field(default_factory=dict)  # changes to BASE
    spelling: dict[str, Any] = field(default_factory=dict)  # how config.json spells layers and RoPE
    pattern: int = 6
    factor: float = 1.0
    left_out: tuple[str, ...] = ()  # keys that config.json leaves to their defaults
    nested: bool = False
    prefix: str = "model."
    head: str = "absent"  # absent, equal or separate


CASES = [
    Case("mqa_layer_types", {"num_key_value_heads": 1}, {**OLD_ROPE, "layer_types": layer_types(7, 6)}),
    Case("gqa_sliding_window_pattern", {"num_hidden_layers": 8}, {**OLD_ROPE, "sliding_window_pattern": 6}),
    Case(
        "equal_heads_underscore_pattern",
        {"num_key_value_heads": 4},
        {**OLD_ROPE, "_sliding_window_pattern": 3},
        pattern=3,
    ),
    Case("no_pattern", {"num_hidden_layers": 13}, {**OLD_ROPE}),
    Case(
        "rope_scaling",
        {},
        {**OLD_ROPE, "rope_scaling": LINEAR_8, "sliding_window_pattern": 2},
        pattern=2,
        factor=8.0,
    ),
    Case(
        "rope_parameters_scalar_168",
        {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "query_pre_attn_scalar": 168},
        {
            "layer_types": layer_types(7, 3),
            "rope_parameters": {
                "full_attention": {"rope_theta": 1_000_000.0, **LINEAR_8},
                "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
            },
        },
        pattern=3,
        factor=8.0,
    ),
    Case(
        "rope_parameters_thetas_outside",
        {},
        {
            **OLD_ROPE,
            "layer_types": layer_types(7, 4),
            "rope_parameters": {"full_attention": LINEAR_8, "sliding_attention": {"rope_type": "default"}},
        },
        pattern=4,
        factor=8.0,
    ),
    Case(
        "nested_sparse",
        {
            "hidden_size": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
        },
        {"rope_scaling": LINEAR_8, "sliding_window_pattern": 2},
        pattern=2,
        factor=8.0,
        left_out=(
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "query_pre_attn_scalar",
            "rms_norm_eps",
            "max_position_embeddings",
            "tie_word_embeddings",
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "hidden_activation",
        ),
        nested=True,
        prefix="language_model.model.",
    ),
    Case("nested_new_names", {}, {**OLD_ROPE}, nested=True, prefix="model.language_model."),
    Case("head_equal", {}, {**OLD_ROPE, "sliding_window_pattern": 6}, head="equal"),
    Case(
        "head_separate",
        {"tie_word_embeddings": False},
        {**OLD_ROPE, "sliding_window_pattern": 6},
        head="separate",
    ),
]


def random_weights(model: Gemma3ForCausalLM, seed: int) -> None:
    """Weights that make every part of the network matter: norms away from zero, sharp attention, no
    saturation."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            scale = 0.3
        elif "embed" in name or "lm_head" in name:
            scale = 0.5
        else:
            scale = 1.5 * parameter.shape[1] ** -0.5
        parameter.data.copy_(values * scale)


def make(case: Case, seed: int) -> None:
    shape = {**BASE, **case.shape}
    rope = {
        "full_attention": {
            "rope_theta": 1_000_000.0,
            **(LINEAR_8 if case.factor != 1.0 else {"rope_type": "default"}),
        },
        "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
    }
    types = layer_types(shape["num_hidden_layers"], case.pattern)
    config = Gemma3TextConfig(**shape, layer_types=types, rope_parameters=rope)
    config._attn_implementation = "eager"
    model = Gemma3ForCausalLM(config).eval()
    random_weights(model, seed)
    token_ids = torch.randint(
        3, shape["vocab_size"], (PROMPT_LENGTH,), generator=torch.Generator().manual_seed(seed)
    )
    token_ids[0] = shape["bos_token_id"]
    with torch.inference_mode():
        logits = model(token_ids[None]).logits[0].float()

    folder = FOLDER / case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = {key: value for key, value in {**shape, **case.spelling}.items() if key not in case.left_out}
    if case.nested:
        raw = {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": text,
        }
        text["model_type"] = "gemma3_text"
    else:
        raw = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **text}
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n")
    weights = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            if case.head != "absent":
                weights[{"model.": "lm_head.weight"}[case.prefix]] = tensor.clone()
        else:
            weights[case.prefix + name.removeprefix("model.")] = tensor.clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    expected = {"token_ids": token_ids, "logits": logits.contiguous()}
    save_file(expected, FOLDER / f"{case.name}.expected.safetensors")
    print(case.name, "logit deviation", float(logits.std()))


if __name__ == "__main__":
    for seed, case in enumerate(CASES):
        make(case, seed)
