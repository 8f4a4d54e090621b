"""Compiling the kernels: cached, built once under concurrent starts, and never in the way of a machine that
cannot."""

import ctypes
import hashlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.host.disk_cache import default_cache_dir
from model.ops.cpu import build as cpu_build
from model.ops.reference import ReferenceOps
from model.ops.select import select_ops
from tests.model.ops.cpu.harness import needs_kernels

VARIANT = cpu_build.VARIANTS[-1]


def test_no_compiler_means_the_reference_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GEMSERVE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        ops = select_ops(torch.device("cpu"), torch.float32)
    assert type(ops) is ReferenceOps
    assert len(caplog.records) == 1
    assert "g++" in caplog.text


def test_a_processor_without_avx2_means_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_build, "detect_variant", lambda: None)
    assert type(select_ops(torch.device("cpu"), torch.bfloat16)) is ReferenceOps
    assert "AVX2" in caplog.text


@needs_kernels
def test_a_source_that_does_not_compile_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "cpp"
    sources.mkdir()
    (sources / "broken.cpp").write_text("this is no C++\n")
    monkeypatch.setattr(cpu_build, "SOURCES", sources)
    with pytest.raises(cpu_build.BuildError, match=r"broken\.cpp"):
        cpu_build.build(cpu_build.VARIANTS[-1], tmp_path / "cache")
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".lock"]


@needs_kernels
def test_concurrent_starts_build_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes at once: one compiles, all load the same library, nothing is left behind."""
    sources = tmp_path / "cpp"
    sources.mkdir()
    (sources / "tiny.cpp").write_text('extern "C" int answer() { return 42; }\n')
    script = (
        "import logging, sys; from pathlib import Path; from model.ops.cpu import build as cpu_build; "
        "import ctypes\n"
        "logging.basicConfig(level=logging.INFO)\n"
        f"cpu_build.SOURCES = Path({str(sources)!r})\n"
        f"path = cpu_build.build(cpu_build.VARIANTS[-1], Path({str(tmp_path / 'cache')!r}))\n"
        "assert ctypes.CDLL(str(path)).answer() == 42\n"
    )
    starts = [
        subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    logs = [start.communicate(timeout=120)[1] for start in starts]
    assert [start.returncode for start in starts] == [0, 0, 0], logs
    assert sum("Compiling" in log for log in logs) == 1
    assert sorted(file.suffix for file in (tmp_path / "cache").iterdir()) == [".lock", ".so"]


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernels are one function, 64 KiB of data and quickly compiled. The folder of the cache."""
    sources = tmp_path / "cpp"
    sources.mkdir()
    numbers = ",".join(map(str, range(1, 16385)))
    (sources / "tiny.cpp").write_text(
        f'extern "C" {{ int data[] = {{{numbers}}}; int answer() {{ return data[41]; }} }}\n'
    )
    monkeypatch.setattr(cpu_build, "SOURCES", sources)
    return tmp_path / "cache"


@needs_kernels
def test_a_damaged_library_is_noticed_before_it_is_loaded_and_built_again(
    small_source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = cpu_build.build(VARIANT, small_source)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for damaged in (b"", whole[: len(whole) // 2], whole[:-1], bytes(flipped)):
        path.write_bytes(damaged)  # as after a crash of the machine, or on a failing disk
        caplog.clear()
        assert cpu_build.build(VARIANT, small_source) == path
        assert "damaged" in caplog.text
        assert len(path.read_bytes()) == len(whole)
    assert ctypes.CDLL(str(path)).answer() == 42
    caplog.clear()
    assert cpu_build.build(VARIANT, small_source) == path
    assert caplog.text == ""


@needs_kernels
def test_a_start_that_is_killed_while_it_compiles_leaves_nothing_to_the_next_one(
    small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho half of it > "$last"\nkill -9 $PPID\n')
    compiler.chmod(0o755)
    script = (
        "from pathlib import Path; from model.ops.cpu import build as cpu_build\n"
        f"cpu_build.SOURCES = Path({str(cpu_build.SOURCES)!r})\n"
        f"cpu_build.build(cpu_build.VARIANTS[-1], Path({str(small_source)!r}))\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "CXX": str(compiler)}, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert [file for file in small_source.iterdir() if file.is_dir()], "the half-written files"
    path = cpu_build.build(VARIANT, small_source)
    assert ctypes.CDLL(str(path)).answer() == 42
    assert sorted(file.suffix for file in small_source.iterdir()) == [".lock", ".so"]


@needs_kernels
def test_a_full_disk_means_the_reference_and_one_warning(small_source: Path) -> None:
    """The limit of the size of files stands for the disk: the compiler itself cannot write its output."""
    script = (
        "import logging, resource; from pathlib import Path; import torch\n"
        "from model.ops.cpu import build as cpu_build; from model.ops.select import select_ops\n"
        "logging.basicConfig(level=logging.WARNING)\n"
        f"cpu_build.SOURCES = Path({str(cpu_build.SOURCES)!r})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "print(type(select_ops(torch.device('cpu'), torch.float32)).__name__)\n"
    )
    environ = {**os.environ, "GEMSERVE_CACHE": str(small_source)}
    start = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    )
    assert start.stdout == "ReferenceOps\n"
    assert start.stderr.count("WARNING") == 1
    assert [file.suffix for file in small_source.iterdir()] == [".lock"]


def test_kernels_beside_the_code_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image: no compiler, and a cache that cannot be written to."""
    sources, prebuilt, cache = tmp_path / "cpp", tmp_path / "prebuilt", tmp_path / "cache"
    sources.mkdir()
    (sources / "tiny.cpp").write_text("int a;\n")
    monkeypatch.setattr(cpu_build, "SOURCES", sources)
    monkeypatch.setattr(cpu_build, "PREBUILT", prebuilt)
    monkeypatch.setenv("CXX", "no-such-compiler")
    variant = cpu_build.VARIANTS[-1]
    with pytest.raises(cpu_build.BuildError, match="compiler"):
        cpu_build.build(variant, cache)
    prebuilt.mkdir()
    library = cpu_build.library_path(variant, prebuilt)
    library.write_bytes(b"kernels" + hashlib.sha256(b"kernels").digest())
    assert cpu_build.build(variant, cache) == library
    (sources / "tiny.cpp").write_text("int b;\n")
    with pytest.raises(cpu_build.BuildError, match="compiler"):  # kernels of other sources are no use
        cpu_build.build(variant, cache)
    assert not cache.exists()


@needs_kernels
def test_prebuilt_are_all_variants_beside_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, prebuilt = tmp_path / "cpp", tmp_path / "prebuilt"
    sources.mkdir()
    (sources / "tiny.cpp").write_text("int a;\n")
    monkeypatch.setattr(cpu_build, "SOURCES", sources)
    monkeypatch.setattr(cpu_build, "PREBUILT", prebuilt)
    monkeypatch.setattr(sys, "argv", ["cpu_build", "--prebuilt"])
    cpu_build.main()
    expected = {cpu_build.library_path(variant, prebuilt) for variant in cpu_build.VARIANTS}
    assert {file for file in prebuilt.iterdir() if file.suffix == ".so"} == expected


def test_the_key_follows_sources_and_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "cpp"
    sources.mkdir()
    (sources / "one.cpp").write_text("int a;\n")
    monkeypatch.setattr(cpu_build, "SOURCES", sources)
    paths = [cpu_build.library_path(variant, tmp_path) for variant in cpu_build.VARIANTS]
    paths.append(cpu_build.library_path(cpu_build.VARIANTS[0], tmp_path, sanitize=True))
    (sources / "one.cpp").write_text("int b;\n")
    paths.append(cpu_build.library_path(cpu_build.VARIANTS[0], tmp_path))
    assert len(set(paths)) == len(paths)


@needs_kernels
@pytest.mark.slow
def test_every_variant_compiles() -> None:
    for variant in cpu_build.VARIANTS:
        assert cpu_build.build(variant, default_cache_dir()).exists()
