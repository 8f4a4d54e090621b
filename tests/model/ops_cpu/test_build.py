"""Compiling the kernels: cached, built once under concurrent starts, and never in the way of a machine that cannot."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.ops import cpu_build, select_ops
from model.ops.reference import ReferenceOps
from tests.model.ops_cpu.harness import needs_kernels


def test_no_compiler_means_the_reference_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GEMSERVE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    cpu_build.load_library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            ops = select_ops(torch.device("cpu"), torch.float32)
    finally:
        cpu_build.load_library.cache_clear()
    assert type(ops) is ReferenceOps
    assert len(caplog.records) == 1
    assert "g++" in caplog.text


def test_a_processor_without_avx2_means_the_reference(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cpu_build, "detect_variant", lambda: None)
    cpu_build.load_library.cache_clear()
    try:
        assert type(select_ops(torch.device("cpu"), torch.bfloat16)) is ReferenceOps
    finally:
        cpu_build.load_library.cache_clear()
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
        "import logging, sys; from pathlib import Path; from model.ops import cpu_build; import ctypes\n"
        "logging.basicConfig(level=logging.INFO)\n"
        f"cpu_build.SOURCES = Path({str(sources)!r})\n"
        f"path = cpu_build.build(cpu_build.VARIANTS[-1], Path({str(tmp_path / 'cache')!r}))\n"
        "assert ctypes.CDLL(str(path)).answer() == 42\n"
    )
    starts = [subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) for _ in range(3)]
    logs = [start.communicate(timeout=120)[1] for start in starts]
    assert [start.returncode for start in starts] == [0, 0, 0], logs
    assert sum("Compiling" in log for log in logs) == 1
    assert sorted(file.suffix for file in (tmp_path / "cache").iterdir()) == [".lock", ".so"]


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
    library.touch()
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
        assert cpu_build.build(variant, cpu_build.default_cache_dir()).exists()
