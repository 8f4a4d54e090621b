"""Packed weights on disk: what is read equals what was packed, and whatever is wrong with an entry or the
disk, models load."""

import errno
import fcntl
import logging
import mmap
import os
import shutil
import time
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from model.checkpoint.open import open_checkpoint
from model.execution import weight_cache as weight_cache_module
from model.execution.runner import ModelRunner
from model.execution.weight_cache import WeightCache, weight_cache_key
from model.host.huge_pages import anonymous_memory
from model.ops.cpu import backend as cpu
from model.ops.cpu.backend import CpuOps
from model.ops.cpu.build import BuildError
from model.ops.reference import ReferenceOps
from tests.model.harness import Harness
from tests.model.ops.cpu.harness import needs_kernels
from tests.model.tiny_models import TINY_FOLDER, random_model, random_prompt
from tests.tiny import write_tiny_folder

NAME = "gqa_sliding_window_pattern"


def load(
    folder: Path, cache: WeightCache | None, *, quantization: str = "none", dtype: str = "float32"
) -> ModelRunner:
    checkpoint = open_checkpoint(str(folder), progress=False)
    return ModelRunner.load(
        checkpoint,
        dtype=dtype,
        device="cpu",
        block_size=4,
        quantization=quantization,
        progress=False,
        weight_cache=cache,
    )


def cache_in(folder: Path) -> WeightCache:
    return WeightCache(folder, "key", smallest=1)


def logits(runner: ModelRunner) -> torch.Tensor:
    return Harness(runner.model, runner.ops, block_size=4, num_tokens=80).all_logits(random_prompt(24))


def entry_in(folder: Path) -> Path:
    (entry,) = folder.glob("*.weights")
    return entry


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the entry of the tiny model."""
    folder = tmp_path_factory.mktemp("packed")
    load(TINY_FOLDER / NAME, cache_in(folder))
    return folder


@needs_kernels
@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [("none", "float32"), ("none", "bfloat16"), ("int8", "float32"), ("int4", "float32")],
)
@pytest.mark.parametrize("model", ["tied", "untied"])
def test_weights_that_are_read_compute_the_same_bits(
    model: Literal["tied", "untied"], quantization: str, dtype: str, tmp_path: Path
) -> None:
    source = write_tiny_folder(tmp_path / "model") if model == "tied" else TINY_FOLDER / "head_separate"
    first = load(source, cache_in(tmp_path), quantization=quantization, dtype=dtype)
    restoring = open_checkpoint(str(source), progress=False)
    restoring.tensors = pytest.fail  # type: ignore[method-assign]  # no weight of the checkpoint is read
    second = ModelRunner.load(
        restoring,
        dtype=dtype,
        device="cpu",
        block_size=4,
        quantization=quantization,
        progress=False,
        weight_cache=cache_in(tmp_path),
    )
    assert torch.equal(logits(first), logits(second))
    assert first.weight_bytes == second.weight_bytes


@needs_kernels
@pytest.mark.parametrize(
    "name", ["empty", "cut", "longer", "magic", "header", "weights", "length", "another network"]
)
def test_a_damaged_entry_is_made_again(
    name: str, packed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = bytearray(entry_in(packed).read_bytes())
    whole = bytes(content)
    if name == "another network":
        load(TINY_FOLDER / "nested_sparse", cache_in(tmp_path))
    else:
        flipped = {"magic": 0, "header": 60, "weights": len(content) // 2, "length": 17}
        if name in flipped:
            content[flipped[name]] ^= 64
        cut: dict[str, bytes | bytearray] = {
            "empty": b"",
            "cut": content[:-4096],
            "longer": content + b"more",
        }
        (tmp_path / "key.weights").write_bytes(cut.get(name, content))
    with caplog.at_level(logging.WARNING, logger="model.execution.weight_cache"):
        runner = load(TINY_FOLDER / NAME, cache_in(tmp_path))
    assert "are not used and are made again" in caplog.text
    assert entry_in(tmp_path).read_bytes() == whole
    assert torch.equal(logits(runner), logits(load(TINY_FOLDER / NAME, None)))


@needs_kernels
def test_a_full_disk_costs_a_line_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1 << 20))
    with caplog.at_level(logging.INFO, logger="model.execution.weight_cache"):
        load(TINY_FOLDER / NAME, cache_in(tmp_path))
    assert "only 1 MiB are free" in caplog.text
    monkeypatch.undo()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    load(TINY_FOLDER / NAME, cache_in(tmp_path))
    assert "cannot be kept" in caplog.text
    assert list(tmp_path.iterdir()) == []


@needs_kernels
def test_a_folder_that_cannot_be_made_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    load(TINY_FOLDER / NAME, cache_in(tmp_path / "file" / "weights"))
    assert "cannot be kept" in caplog.text


@needs_kernels
def test_a_folder_that_may_not_be_entered_ends_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(file: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "exists", refused)
        cache = cache_in(tmp_path)
    load(TINY_FOLDER / NAME, cache)
    assert entry_in(tmp_path).stat().st_size > 0


@needs_kernels
def test_a_start_without_the_kernels_leaves_their_entry_alone(
    packed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one with a GPU does, or one where the compiler was removed."""

    def missing() -> None:
        raise BuildError("no C++ compiler was found")

    monkeypatch.setattr(cpu, "load_library", missing)
    before = entry_in(packed).read_bytes()
    runner = load(TINY_FOLDER / NAME, cache_in(packed))
    assert type(runner.ops) is ReferenceOps
    assert "packed weights" not in caplog.text
    assert entry_in(packed).read_bytes() == before
    assert torch.equal(logits(runner), logits(load(TINY_FOLDER / NAME, None)))


@needs_kernels
def test_weights_are_read_where_the_system_has_no_huge_pages(
    packed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)
    cache = cache_in(packed)
    load(TINY_FOLDER / NAME, cache)
    assert "are not used" not in caplog.text


def test_weights_lie_in_private_memory_which_is_what_huge_pages_are_given_to() -> None:
    memory = anonymous_memory(8 << 20)
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        area, kind, *_ = line.split()
        first, end = (int(number, 16) for number in area.split("-"))
        if first <= address < end:
            assert kind.endswith("p"), line
            return
    pytest.fail("the memory is not there")


@needs_kernels
def test_of_starts_at_the_same_time_one_writes(tmp_path: Path) -> None:
    first, second = cache_in(tmp_path), cache_in(tmp_path)
    half_written = tmp_path / ".writing-key-other"
    half_written.touch()
    with half_written.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        load(TINY_FOLDER / NAME, first)
        assert list(tmp_path.iterdir()) == [half_written]
    load(TINY_FOLDER / NAME, first)  # whoever wrote it has ended without
    written = entry_in(tmp_path).stat()
    load(TINY_FOLDER / NAME, second)
    assert entry_in(tmp_path).stat() == written


@needs_kernels
def test_what_is_too_small_to_be_slow_is_not_kept(tmp_path: Path) -> None:
    load(TINY_FOLDER / NAME, WeightCache(tmp_path, "key"))
    assert list(tmp_path.iterdir()) == []


def test_a_backend_without_packed_forms_keeps_nothing(tmp_path: Path) -> None:
    cache_in(tmp_path).save(random_model())
    assert list(tmp_path.iterdir()) == []


@needs_kernels
def test_entries_used_longest_ago_and_abandoned_files_make_room(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = entry_in(packed).stat().st_size
    monkeypatch.setattr(weight_cache_module, "MAX_TOTAL_BYTES", int(2.5 * size))
    now = time.time()
    entries = {"old.weights": 50, "older.weights": 90}
    half_written = {
        ".writing-now": -600,
        ".writing-locked": 600,
        ".writing-killed": 600,
        ".writing-abandoned": 4000,
    }
    for name, age in (entries | half_written).items():
        shutil.copy(entry_in(packed), tmp_path / name)
        os.utime(tmp_path / name, (now - age, now - age))
    with (
        (tmp_path / ".writing-locked").open("rb") as locked,
        (tmp_path / ".writing-abandoned").open("rb") as ancient,
    ):
        for stream in (locked, ancient):
            fcntl.flock(stream, fcntl.LOCK_EX)
        load(TINY_FOLDER / NAME, cache_in(tmp_path))
    assert {file.name for file in tmp_path.iterdir()} == {
        "key.weights",
        "old.weights",
        ".writing-now",
        ".writing-locked",
    }
    os.utime(tmp_path / "old.weights", (now - 5, now - 5))
    os.utime(tmp_path / "key.weights", (now - 50, now - 50))
    load(TINY_FOLDER / NAME, cache_in(tmp_path))  # a use makes it the youngest
    assert (tmp_path / "key.weights").stat().st_mtime > now - 5


def test_the_key_names_all_that_packed_weights_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny_folder(tmp_path / "model")

    def key(**settings: str) -> str | None:
        defaults = {"dtype": "auto", "device": "auto", "quantization": "auto"}
        return weight_cache_key(open_checkpoint(str(source), progress=False), **{**defaults, **settings})

    first = key()
    assert first == key()
    others = [key(dtype="float32"), key(quantization="int8")]
    os.utime(source / "model.safetensors", (1, 1))
    others.append(key())
    monkeypatch.setattr(weight_cache_module, "cpu_flags", lambda: frozenset({"avx2"}))
    others.append(key())
    monkeypatch.setattr(weight_cache_module, "version", lambda package: "3.0")
    others.append(key())
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "linear.cpp").write_text("// other kernels")
    monkeypatch.setattr(weight_cache_module, "SOURCES", tmp_path)
    others.append(key())
    assert None not in others
    assert len({first, *others}) == 1 + len(others)
    assert key(device="cuda") is None
    monkeypatch.setenv("GEMSERVE_CPU_KERNELS", "/somewhere/kernels.so")
    assert key() is None


@needs_kernels
def test_restored_weights_are_those_of_this_backend(packed: Path, tmp_path: Path) -> None:
    runner = load(TINY_FOLDER / NAME, cache_in(packed))
    assert isinstance(runner.ops, CpuOps)
    assert runner.model.packed_forms().keys() == runner.model.weight_owners().keys()
