"""The published sizes: their configurations mean what the model's table says, each is planned without any
weights, and random checkpoints of true widths load as a stream and run. ``python -m tests.sizes`` does so
with all sizes and whole vocabularies.
"""

import logging
from pathlib import Path

import pytest
import torch

from model.checkpoint.open import open_checkpoint
from model.config.gemma3_config import SIZES, Gemma3Config
from model.config.tensors import parameter_count
from model.network.gemma3 import Gemma3
from model.ops.reference import ReferenceOps
from tests.sizes.checkpoints import (
    VISION_TENSORS,
    cut_config,
    is_multimodal,
    published_config,
    write_checkpoint,
)
from tests.sizes.checks import run_sizes

# Hidden size, query and KV heads, head_dim, window, linear scale of the global layers' positions,
# query_pre_attn_scalar.
TABLE = {
    "270m": (640, 4, 1, 256, 512, 1.0, 256.0),
    "1b": (1152, 4, 1, 256, 512, 1.0, 256.0),
    "4b": (2560, 8, 4, 256, 1024, 8.0, 256.0),
    "12b": (3840, 16, 8, 256, 1024, 8.0, 256.0),
    "27b": (5376, 32, 16, 128, 1024, 8.0, 168.0),
}
DEPTHS = {"270m": (18, 3), "1b": (26, 4), "4b": (34, 5), "12b": (48, 8), "27b": (62, 10)}


@pytest.mark.parametrize("size", SIZES)
def test_a_published_configuration_is_that_size(size: str) -> None:
    config = Gemma3Config.from_hf(published_config(size))
    assert config == SIZES[size]
    shape = (config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert (*shape, config.sliding_window, config.rope_scaling_factor, config.query_pre_attn_scalar) == TABLE[
        size
    ]
    assert (config.num_hidden_layers, config.num_global_layers) == DEPTHS[size]
    if size == "27b":
        assert config.query_pre_attn_scalar == config.hidden_size / config.num_attention_heads


@pytest.mark.parametrize("size", SIZES)
def test_a_network_of_any_size_is_built_and_planned_without_weights(size: str) -> None:
    config = SIZES[size]
    model = Gemma3(config, ReferenceOps(torch.device("cpu"), torch.bfloat16), config.vocab_size)
    assert model.embedding.weight.is_meta
    attention = model.blocks[0].attention
    assert attention.query_scale == pytest.approx(TABLE[size][-1] ** -0.5)
    assert (
        attention.qkv.out_features
        == (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    )
    plain, scaled = model.rotary.inverse_frequencies.squeeze(1)
    assert len(scaled) == len(plain) == config.head_dim // 2
    assert scaled[0] == pytest.approx(1 / TABLE[size][-2])
    assert plain[0] == 1.0
    plan = config.kv_cache_spec(16, 2).plan(
        16 << 30, max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=32_768, prefix_caching=False
    )
    assert plan.global_bytes + plan.local_bytes <= 16 << 30
    assert plan.capacity_tokens >= 32_768


def test_true_widths_load_within_their_weights_and_one_matrix_and_run() -> None:
    for size, measured in run_sizes(["1b", "4b"], vocab_size=8192).items():
        config = cut_config(size, (False, True), 8192)[1]
        assert measured.weights >= 2 * parameter_count(config, tied=True)


def test_the_vision_tower_is_skipped_with_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert [size for size in SIZES if is_multimodal(size)] == ["4b", "12b", "27b"]
    write_checkpoint(tmp_path, "4b", global_layers=(False,), vocab_size=256)
    with caplog.at_level(logging.INFO):
        checkpoint = open_checkpoint(str(tmp_path), progress=False)
    assert (
        f"skipping {len(VISION_TENSORS)} tensors of the vision tower and projector; only text is served"
        in caplog.text
    )
    assert len(checkpoint.weight_files) == 2
    names = [name for name, _ in checkpoint.tensors()]
    assert len(names) == 13 + 2
    assert not any("vision" in name or "projector" in name for name in names)
