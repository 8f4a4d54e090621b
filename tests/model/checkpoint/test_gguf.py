"""A GGUF file gives the configuration and weights of the Hugging Face folder of the same model; broken ones
are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from model.checkpoint.base import Checkpoint
from model.interface.errors import CheckpointError, ConfigError, ModelError
from tests.model.checkpoint.conftest import CONFIG, TOKENS, random_weights, write_folder, write_gguf

Open = Callable[[Path], Checkpoint]
Weights = dict[str, torch.Tensor]
Q = gguf.GGMLQuantizationType


def test_gguf_and_folder_of_the_same_weights_agree(tmp_path: Path, weights: Weights, opened: Open) -> None:
    from_gguf = opened(write_gguf(tmp_path / "tiny.gguf", weights))
    from_folder = opened(write_folder(tmp_path / "tiny", weights))
    assert from_gguf.config == from_folder.config
    assert from_gguf.config.eos_token_ids == (1, 4)  # <eos> and <end_of_turn>, whichever format names which
    loaded = dict(from_gguf.tensors())
    for name, tensor in from_folder.tensors():
        # The norms lose at most one rounding to float32 near 1, by adding and subtracting it.
        torch.testing.assert_close(loaded.pop(name), tensor.float(), rtol=0, atol=2e-7)
    assert not loaded


def test_every_norm_loses_the_one_that_gguf_adds(tmp_path: Path, weights: Weights, opened: Open) -> None:
    zero_norms = {
        name: torch.zeros_like(tensor) if tensor.ndim == 1 else tensor for name, tensor in weights.items()
    }
    checkpoint = opened(write_gguf(tmp_path / "tiny.gguf", zero_norms))
    norms = [tensor for _, tensor in checkpoint.tensors() if tensor.ndim == 1]
    assert len(norms) == 6 * CONFIG.num_hidden_layers + 1
    assert all(torch.equal(norm, torch.zeros_like(norm)) for norm in norms)


@pytest.mark.parametrize("quantization", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1])
def test_quantised_types_come_out_in_float32(
    quantization: Any, tmp_path: Path, weights: Weights, opened: Open
) -> None:
    checkpoint = opened(write_gguf(tmp_path / "tiny.gguf", weights, quantization=quantization))
    for name, tensor in checkpoint.tensors():
        assert tensor.dtype == torch.float32
        # Weights are about 0.1; 4 bits over a block's range of +-0.4 leave steps of 0.05.
        torch.testing.assert_close(tensor, weights[name].float(), rtol=0, atol=0.06)
    assert checkpoint.weight_format == quantization.name


def test_a_large_tensor_is_dequantised_slice_by_slice_to_the_same_values(
    tmp_path: Path, weights: Weights, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = opened(write_gguf(tmp_path / "tiny.gguf", weights, quantization=Q.Q4_0))
    whole = dict(checkpoint.tensors())
    monkeypatch.setattr("model.checkpoint.dequantize.SLICE_ELEMENTS", 200)
    for name, tensor in checkpoint.tensors():
        assert torch.equal(tensor, whole[name])


def test_the_tensors_outlive_the_checkpoint(tmp_path: Path, weights: Weights, opened: Open) -> None:
    checkpoint = opened(write_gguf(tmp_path / "tiny.gguf", weights))
    loaded = dict(checkpoint.tensors())
    checkpoint.close()
    assert torch.equal(loaded["model.embed_tokens.weight"], weights["model.embed_tokens.weight"].float())
    with pytest.raises(CheckpointError, match="closed"):
        next(iter(checkpoint.tensors()))


def test_the_fingerprint_follows_the_content_not_the_place(tmp_path: Path, opened: Open) -> None:
    (tmp_path / "elsewhere").mkdir()
    first = opened(write_gguf(tmp_path / "a.gguf", random_weights(seed=0))).fingerprint
    same = opened(write_gguf(tmp_path / "elsewhere" / "b.gguf", random_weights(seed=0))).fingerprint
    other = opened(write_gguf(tmp_path / "c.gguf", random_weights(seed=1))).fingerprint
    assert first == same != other


@pytest.mark.parametrize(("head", "tied"), [("absent", True), ("equal", True), ("different", False)])
def test_output_head(head: str, tied: bool, tmp_path: Path, weights: Weights, opened: Open) -> None:
    embedding = weights["model.embed_tokens.weight"]
    if head != "absent":
        weights["lm_head.weight"] = embedding if head == "equal" else embedding + 1
    checkpoint = opened(write_gguf(tmp_path / "tiny.gguf", weights))
    assert checkpoint.config.tie_word_embeddings is tied
    assert ("lm_head.weight" in dict(checkpoint.tensors())) is not tied


def test_a_missing_tensor_is_named(tmp_path: Path, weights: Weights, opened: Open) -> None:
    del weights["model.layers.3.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"tiny.gguf.*model\.layers\.3\.mlp\.up_proj\.weight.*missing"):
        opened(write_gguf(tmp_path / "tiny.gguf", weights))


def test_an_unknown_tensor_is_named(tmp_path: Path, opened: Open) -> None:
    with pytest.raises(CheckpointError, match=r"tiny.gguf.*model\.extra\.weight"):
        opened(
            write_gguf(tmp_path / "tiny.gguf", {"model.extra.weight": torch.zeros(32, 32)}, raw_names=True)
        )


def test_a_wrong_shape_is_named(tmp_path: Path, weights: Weights, opened: Open) -> None:
    weights["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(64)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q_norm\.weight.*\[64\].*\[32\]"):
        opened(write_gguf(tmp_path / "tiny.gguf", weights))


def test_a_token_list_of_another_length_than_the_embedding_is_refused(
    tmp_path: Path, weights: Weights, opened: Open
) -> None:
    shorter = {
        "tokenizer.ggml.tokens": TOKENS[:-1],
        "tokenizer.ggml.scores": [0.0] * 319,
        "tokenizer.ggml.token_type": [1] * 319,
    }
    with pytest.raises(CheckpointError, match=r"token_embd\.weight.*320 rows.*319 tokens"):
        opened(write_gguf(tmp_path / "tiny.gguf", weights, changes=shorter))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gemma3.block_count": 10**6}, "num_hidden_layers"),
        ({"gemma3.block_count": 8}, r"model\.layers\.7"),
        ({"gemma3.block_count": None}, r"gemma3\.block_count"),
        ({"gemma3.attention.sliding_window": None}, r"attention\.sliding_window"),
        ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.scores": None}, r"tokenizer\.ggml\.scores"),
        ({"tokenizer.ggml.token_type": [1] * 10}, r"tokenizer\.ggml\.token_type"),
        ({"tokenizer.ggml.model": "gpt2"}, r"tokenizer\.ggml\.model"),
        ({"tokenizer.ggml.add_space_prefix": True}, "add_space_prefix"),
        ({"split.count": 2}, "split"),
        ({"general.alignment": 0}, r"general\.alignment"),
    ],
)
def test_a_bad_key_is_named(
    changes: dict[str, Any], named: str, tmp_path: Path, weights: Weights, opened: Open
) -> None:
    with pytest.raises(ModelError, match=f"tiny.gguf.*{named}"):
        opened(write_gguf(tmp_path / "tiny.gguf", weights, changes=changes))


def test_a_type_that_cannot_be_dequantised_names_the_tensor(
    tmp_path: Path, weights: Weights, opened: Open
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", weights)
    content = bytearray(path.read_bytes())
    name = b"blk.2.attn_q.weight"
    position = content.index(name) + len(name) + 4 + 2 * 8
    content[position : position + 4] = Q.I32.to_bytes(4, "little")  # same size as F32
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"blk\.2\.attn_q\.weight.*I32"):
        opened(path)


def test_values_that_are_not_finite_are_refused_while_loading(
    tmp_path: Path, weights: Weights, opened: Open
) -> None:
    weights["model.norm.weight"] = torch.full((64,), float("nan"))
    checkpoint = opened(write_gguf(tmp_path / "tiny.gguf", weights))
    with pytest.raises(CheckpointError, match=r"output_norm\.weight.*not finite"):
        dict(checkpoint.tensors())


def test_missing_empty_and_foreign_files_are_refused(tmp_path: Path, opened: Open) -> None:
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "pickle.bin").write_bytes(b"x")
    for path, text in (
        ("nowhere.gguf", "no such file"),
        ("empty.gguf", "is empty"),
        ("pickle.bin", "only .gguf files"),
    ):
        with pytest.raises(CheckpointError, match=text):
            opened(tmp_path / path)


def test_a_folder_with_one_gguf_file_and_no_config_is_that_file(
    tmp_path: Path, weights: Weights, opened: Open
) -> None:
    (tmp_path / "my-model").mkdir()
    write_gguf(tmp_path / "my-model" / "weights.gguf", weights)
    checkpoint = opened(tmp_path / "my-model")
    assert (checkpoint.name, checkpoint.config) == ("my-model", CONFIG.with_eos_token_ids([4]))


def test_a_chat_template_in_the_file_is_found(tmp_path: Path, weights: Weights, opened: Open) -> None:
    changes = {"tokenizer.chat_template": "{{ messages }}"}
    assert (
        opened(write_gguf(tmp_path / "tiny.gguf", weights, changes=changes)).chat_template == "{{ messages }}"
    )
    assert opened(write_gguf(tmp_path / "plain.gguf", weights)).chat_template is None


def test_config_errors_keep_their_kind(tmp_path: Path, weights: Weights, opened: Open) -> None:
    with pytest.raises(ConfigError):
        opened(write_gguf(tmp_path / "tiny.gguf", weights, changes={"gemma3.attention.head_count": 3}))


def test_numpy_warnings_stay_out_of_loading(tmp_path: Path, opened: Open) -> None:
    """Values beyond float16's range are noticed as not finite, not as a numpy warning."""
    huge = {
        name: torch.full_like(tensor, 1e38) if tensor.ndim == 2 else tensor
        for name, tensor in random_weights().items()
    }
    with np.errstate(over="ignore"):
        path = write_gguf(tmp_path / "tiny.gguf", huge, quantization=Q.Q8_0)
    with pytest.raises(CheckpointError, match="not finite"):
        dict(opened(path).tensors())
