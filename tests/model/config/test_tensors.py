"""The table of tensors: names and shapes as the checkpoints have them, and all that is derived from it."""

from dataclasses import replace

import pytest
import torch

from model.checkpoint.gguf_checkpoint import canonical_name
from model.config.gemma3_config import SIZES
from model.config.tensors import (
    EMBEDDING,
    HEAD,
    Split,
    checkpoint_tensors,
    layer_linears,
    layer_tensors,
    model_tensors,
    parameter_count,
)
from model.parallel.split import Part, divided_config, possible_sizes
from tests.model.tiny_models import CONFIG

# Of google/gemma-3-1b: as its model.safetensors has them.
LAYER_OF_1B = {
    "input_layernorm": (1152,),
    "self_attn.q_proj": (1024, 1152),
    "self_attn.k_proj": (256, 1152),
    "self_attn.v_proj": (256, 1152),
    "self_attn.o_proj": (1152, 1024),
    "self_attn.q_norm": (256,),
    "self_attn.k_norm": (256,),
    "post_attention_layernorm": (1152,),
    "pre_feedforward_layernorm": (1152,),
    "mlp.gate_proj": (6912, 1152),
    "mlp.up_proj": (6912, 1152),
    "mlp.down_proj": (1152, 6912),
    "post_feedforward_layernorm": (1152,),
}
# As llama.cpp names the tensors of a block.
GGUF_BLOCK = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "attn_q_norm",
    "attn_k_norm",
    "post_attention_norm",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
    "post_ffw_norm",
)


def test_names_and_shapes_are_those_of_the_published_checkpoint() -> None:
    expected: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (262_144, 1152)}
    for layer in range(26):
        expected |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in LAYER_OF_1B.items()}
    expected["model.norm.weight"] = (1152,)
    found = {spec.name: spec.shape for spec in checkpoint_tensors(SIZES["1b"])}
    assert found == expected
    assert list(found) == list(expected), "the order in which weights are streamed"
    assert all(
        len(spec.shape) == (1 if spec.role == "norm" else 2) for spec in checkpoint_tensors(SIZES["1b"])
    )


def test_a_head_is_in_a_checkpoint_where_it_is_not_the_embedding() -> None:
    untied = replace(CONFIG, tie_word_embeddings=False)
    head = model_tensors(CONFIG)[HEAD]
    assert head == model_tensors(untied)[HEAD]
    assert head.shape == model_tensors(CONFIG)[EMBEDDING].shape
    assert checkpoint_tensors(untied) == [*checkpoint_tensors(CONFIG), head]
    extra = parameter_count(CONFIG, tied=False) - parameter_count(CONFIG, tied=True)
    assert extra == CONFIG.vocab_size * CONFIG.hidden_size


def test_linear_weights_are_fused_of_all_matrices_of_a_block_each_once() -> None:
    linears = layer_linears(SIZES["4b"], 3)
    sizes = {role: (linear.out_features, linear.in_features) for role, linear in linears.items()}
    assert sizes == {
        "qkv": (8 * 256 + 2 * 4 * 256, 2560),
        "attention_output": (2560, 8 * 256),
        "gate_up": (2 * 10_240, 2560),
        "down": (2560, 10_240),
    }
    fused = [piece.name for linear in linears.values() for piece in linear.pieces]
    assert fused == [spec.name for spec in layer_tensors(SIZES["4b"], 3).values() if spec.role != "norm"]
    assert [name.split(".")[-2] for name in fused[:3]] == ["q_proj", "k_proj", "v_proj"]


def test_gguf_has_a_name_for_every_tensor() -> None:
    names = ["token_embd.weight", "output_norm.weight", "output.weight"]
    names += [
        f"blk.{layer}.{part}.weight" for layer in range(SIZES["27b"].num_hidden_layers) for part in GGUF_BLOCK
    ]
    canonical = [canonical_name(name) for name in names]
    assert sorted(canonical) == sorted(model_tensors(SIZES["27b"]))


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_holds_the_tensors_of_the_smaller_model_that_it_computes(size: str) -> None:
    """The part of each tensor and the divided configuration describe the same share."""
    whole = SIZES[size]
    for ranks in possible_sizes(whole):
        smaller = model_tensors(divided_config(whole, ranks))
        part = Part(whole, whole.vocab_size, ranks - 1, ranks)
        for spec in checkpoint_tensors(whole):
            held = part.tensor(spec.name, torch.empty(spec.shape, device="meta"))
            if spec.role != "embedding":
                assert tuple(held.shape) == smaller[spec.name].shape, spec.name
        if ranks > 1:
            assert len(part.embedding_rows) < whole.vocab_size


def test_units_stay_whole() -> None:
    tensors = layer_tensors(SIZES["27b"], 0)
    assert tensors["self_attn.k_proj"].split == Split(0, 16)
    assert tensors["self_attn.o_proj"].split == Split(1, 32)
    for spec in tensors.values():
        if spec.split is not None:
            assert spec.shape[spec.split.dim] % spec.split.units == 0
