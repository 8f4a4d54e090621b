"""Random checkpoints with the true widths of the published sizes, cut to few layers: folders as they are
published, with shards, an index and, from 4B on, names with a prefix and a vision tower. Written as a stream,
in bfloat16: only the disk limits them.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from model.config.gemma3_config import SIZES, Gemma3Config
from model.config.tensors import checkpoint_tensors

PIECE = (1 << 20) + 7  # numbers drawn once and repeated; odd, so that no two rows of a matrix are alike
VISION_TENSORS = {
    "vision_tower.vision_model.embeddings.patch_embedding.weight": (1152, 3, 14, 14),
    "vision_tower.vision_model.post_layernorm.weight": (1152,),
    "multi_modal_projector.mm_input_projection_weight": (1152, 2560),
}


def is_multimodal(size: str) -> bool:
    return SIZES[size].hidden_size > 1152


def published_config(size: str) -> dict[str, Any]:
    """``config.json`` as it is published, apart from keys that no loader of the text model reads."""
    config = SIZES[size]
    text = {
        "model_type": "gemma3_text",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "sliding_window": config.sliding_window,
    }
    heads = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
    }
    if size == "27b":
        text |= heads | {"query_pre_attn_scalar": 168}
    elif size == "12b":
        text |= {"num_attention_heads": 16, "num_key_value_heads": 8}
    if is_multimodal(size):
        text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
        outer = {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "eos_token_id": [1, 106],
        }
        return {**outer, "text_config": text, "vision_config": {"model_type": "siglip_vision_model"}}
    return {
        **text,
        **heads,
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": config.vocab_size,
        "eos_token_id": [1, 106],
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": config.max_position_embeddings,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window_pattern": 6,
    }


def cut_config(
    size: str, global_layers: tuple[bool, ...], vocab_size: int | None
) -> tuple[dict[str, Any], Gemma3Config]:
    """A published configuration with fewer layers, as it stands in the file and as it is understood."""
    raw = published_config(size)
    text = raw.get("text_config", raw)
    text["num_hidden_layers"] = len(global_layers)
    text["layer_types"] = [
        "full_attention" if is_global else "sliding_attention" for is_global in global_layers
    ]
    vocab_size = vocab_size or SIZES[size].vocab_size
    text["vocab_size"] = vocab_size
    shape = replace(
        SIZES[size], vocab_size=vocab_size, num_hidden_layers=len(global_layers), global_layers=global_layers
    )
    return raw, shape


def write_checkpoint(
    folder: Path,
    size: str,
    *,
    global_layers: tuple[bool, ...] = (False, True),
    vocab_size: int | None = None,
    seed: int = 0,
) -> Gemma3Config:
    """Write a folder with one shard for the embedding and one for each layer; the configuration of what is in
    it."""
    folder.mkdir(parents=True, exist_ok=True)
    raw, config = cut_config(size, global_layers, vocab_size)
    (folder / "config.json").write_text(json.dumps(raw))
    prefix = "language_model." if is_multimodal(size) else ""
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    for spec in checkpoint_tensors(config):
        number = int(spec.name.split(".")[2]) + 2 if ".layers." in spec.name else 1
        shards.setdefault(f"model-{number:05}-of-{len(global_layers) + 1:05}.safetensors", {})[
            prefix + spec.name
        ] = spec.shape
    if is_multimodal(size):
        shards[min(shards)] |= VISION_TENSORS
    piece = torch.randn(PIECE, generator=torch.Generator().manual_seed(seed))
    for file, shapes in shards.items():
        _write_shard(folder / file, shapes, piece)
    weight_map = {name: file for file, shapes in shards.items() for name in shapes}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return config


def _write_shard(file: Path, shapes: Mapping[str, tuple[int, ...]], piece: torch.Tensor) -> None:
    header, start = {}, 0
    for name, shape in shapes.items():
        end = start + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
        start = end
    content = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(content)) + content)
        for name, shape in shapes.items():
            numbers = torch.Size(shape).numel()
            if name in VISION_TENSORS:
                stream.truncate(stream.seek(2 * numbers, 1))  # zeros that take no room
                continue
            for part in _numbers(numbers, piece * _scale(name, shape)):
                stream.write(part)


def _numbers(count: int, piece: torch.Tensor) -> Iterator[memoryview]:
    whole = piece.bfloat16().view(torch.int16).numpy()
    while count:
        part = whole[:count]
        yield part.data
        count -= len(part)


def _scale(name: str, shape: tuple[int, ...]) -> float:
    """Under which every layer matters and nothing saturates."""
    if name.endswith("norm.weight"):
        return 0.2
    return 0.03 if "embed" in name else shape[1] ** -0.5
