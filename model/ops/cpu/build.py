"""Compiles the C++ kernels on first use and loads them: one shared library without any tie to torch's or
Python's headers, called through ctypes, so that it builds in seconds. It lives in the cache on disk under a
key of everything it depends on, and ends with the SHA-256 of its own content: damage is noticed before it is
mapped, and repaired. Concurrent starts build it once. ``python -m model.ops.cpu.build`` builds every variant
ahead of time; with ``--prebuilt`` beside the code, for an image without a compiler and with a read-only file
system.

Variants differ in the instructions that they use, never in their source: those for AVX-512 are the same
kernels over wider vectors.
"""

import argparse
import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from model.host.cpu_features import CPU_ISAS, cpu_flags
from model.host.disk_cache import DiskCache, default_cache_dir
from model.ops.cpu.records import check_sizes

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpp"
PREBUILT = Path(__file__).parent / "prebuilt"  # a library here is preferred to the cache
# -ffp-contract=off: only the fused multiply-adds that the source asks for, so that results do not depend on
# what the compiler chooses to fuse.
COMMON_FLAGS = ("-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra")
DIGEST_BYTES = 32
OPTIMISED = ("-O3",)
SANITIZED = (
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
# GCC warns about its own AVX-512 headers without the last flag.
_AVX512 = (
    *_AVX2,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
)


@dataclass(frozen=True, slots=True)
class Variant:
    """The kernels compiled for one instruction set of ``CPU_ISAS``, each of which includes the sets before
    it."""

    name: str
    compiler_flags: tuple[str, ...]

    @property
    def cpu_flags(self) -> frozenset[str]:
        """The CPU flags that the processor must have."""
        names = list(CPU_ISAS)
        return frozenset().union(*(CPU_ISAS[name] for name in names[: names.index(self.name) + 1]))


VARIANTS = (  # best first
    Variant("avx512_vnni", (*_AVX512, "-mavx512vnni")),
    Variant("avx512", _AVX512),
    Variant("avx2", _AVX2),
)


class BuildError(Exception):
    """The kernels cannot be had on this machine; the text says why and what to do."""


def detect_variant() -> Variant | None:
    """The best variant that this processor runs, up to the set that GEMSERVE_CPU_ISA names; None where it
    runs none."""
    available = cpu_flags()
    return next((variant for variant in VARIANTS if variant.cpu_flags <= available), None)


def _source_files() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def library_path(variant: Variant, cache_dir: Path, *, sanitize: bool = False) -> Path:
    digest = hashlib.sha256(b"sealed\0")
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    for word in (*COMMON_FLAGS, *(SANITIZED if sanitize else OPTIMISED), *variant.compiler_flags):
        digest.update(word.encode() + b"\0")
    return cache_dir / f"ext-{variant.name}-{digest.hexdigest()[:20]}.so"


def build(variant: Variant, cache_dir: Path, *, sanitize: bool = False) -> Path:
    """The compiled library of a variant, built unless it lies beside the code or in the cache. Raises
    BuildError."""
    prebuilt = library_path(variant, PREBUILT, sanitize=sanitize)
    target = library_path(variant, cache_dir, sanitize=sanitize)
    if _is_whole(prebuilt):
        return prebuilt
    if _is_whole(target):
        return target
    compiler = _compiler()
    if compiler is None:
        raise BuildError("no C++ compiler was found; install g++, or set CXX to a GCC")
    cache = DiskCache(cache_dir)
    try:
        with cache.locked(target.name):
            if not _is_whole(target):
                if target.exists():
                    logger.warning("The compiled CPU kernels %s are damaged and are built again.", target)
                logger.info(
                    "Compiling the CPU kernels (%s) into %s; this happens once.", variant.name, target
                )
                _compile(compiler, variant, cache, target.name, SANITIZED if sanitize else OPTIMISED)
    except OSError as error:
        raise BuildError(
            f"the kernels cannot be built in {cache_dir} ({error}); set GEMSERVE_CACHE to a writable folder"
        ) from error
    return target


def _is_whole(library: Path) -> bool:
    try:
        content = library.read_bytes()
    except OSError:  # absent, or unreadable and to be replaced
        return False
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def _compile(compiler: str, variant: Variant, cache: DiskCache, name: str, mode: tuple[str, ...]) -> None:
    flags = (*COMMON_FLAGS, *mode, *variant.compiler_flags)
    with cache.workspace(name) as folder:

        def compile_one(source: Path) -> str:
            result = str(folder / f"{source.stem}.o")
            _run([compiler, *flags, "-c", str(source), "-o", result])
            return result

        with ThreadPoolExecutor(max_workers=max(1, min(4, len(os.sched_getaffinity(0))))) as pool:
            objects = list(pool.map(compile_one, _source_files()))
        library = folder / name
        sanitizers = [flag for flag in mode if flag.startswith("-fsanitize")]
        _run([compiler, "-shared", *sanitizers, *objects, "-pthread", "-o", str(library)])
        content = library.read_bytes()
        with cache.writing(name) as stream:
            stream.write(content)
            stream.write(hashlib.sha256(content).digest())  # loaders don't look at what stands behind the end


def _run(command: list[str]) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise BuildError(f"the compiler failed: {' '.join(command)}\n{finished.stderr[-2000:]}")


def has_kernels() -> bool:
    """Whether ``load_library`` is likely to succeed, without compiling anything: the processor runs a
    variant, and its library or a compiler is there."""
    variant = detect_variant()
    if variant is None:
        return False
    libraries = (library_path(variant, folder) for folder in (PREBUILT, default_cache_dir()))
    return any(library.exists() for library in libraries) or _compiler() is not None


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def load_library() -> ctypes.CDLL:
    """The kernels for this processor, with the signatures of their functions set. Raises BuildError.

    For tests, GEMSERVE_SANITIZE=1 asks for a build with sanitizers, GEMSERVE_CPU_KERNELS names a library
    built elsewhere.
    """
    variant = detect_variant()
    if variant is None:
        raise BuildError("this processor has neither AVX2 nor AVX-512")
    override = os.environ.get("GEMSERVE_CPU_KERNELS")
    return _load(variant, override, default_cache_dir(), os.environ.get("GEMSERVE_SANITIZE") == "1")


@functools.cache
def _load(variant: Variant, override: str | None, cache_dir: Path, sanitize: bool) -> ctypes.CDLL:
    path = Path(override) if override else build(variant, cache_dir, sanitize=sanitize)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded ({error}); remove it, and it is built again") from error
    _declare(library)
    check_sizes(library)
    return library


def _declare(library: ctypes.CDLL) -> None:
    pointer, long, int_, float_ = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
    record = ctypes.c_void_p  # address of a structure of model/ops/cpu/records.py
    signatures = {
        "pack_linear": (pointer, pointer, int_, int_),
        "few_bits_needed": (pointer, int_, long, long, pointer, int_),
        "pack_sketch": (pointer, pointer, pointer, int_),
        "linear": (pointer, pointer, int_, long, pointer, int_, int_),
        "advise_huge_pages": (pointer, long),
        "rms_norm": (pointer, pointer, pointer, long, long, float_, int_, int_),
        "norm_add_norm": (pointer, pointer, pointer, pointer, pointer, long, long, float_, int_, int_),
        "geglu": (pointer, pointer, long, long, int_, int_),
        "qk_norm_rope_cache_write": (record,),
        "paged_attention": (record,),
        "decoder_layers": (record, long, record),
        "all_finite": (pointer, long, long, pointer, int_),
        "argmax": (pointer, long, long, pointer, int_),
        "mask_rows": (pointer, pointer, long, long, pointer, int_),
        "top_candidates": (pointer, long, long, long, pointer, pointer, pointer, pointer, int_),
        "dequantize": (pointer, pointer, long, int_, pointer, int_),
        "draw": (pointer, long, long, pointer, pointer, pointer, pointer, pointer, int_),
    }
    for name, types in signatures.items():
        function = getattr(library, name)
        function.argtypes = types
        function.restype = None
    library.vector_width.argtypes = ()
    library.vector_width.restype = int_
    counts = {
        "packed_elements": (long, long),
        "few_bits_panels": (long,),
        "few_bits_panel_bytes": (long, int_),
        "sketch_spreads": (long,),
        "multiply_in_registers": (int_, long, long, int_),
        "greedy": (pointer, pointer, pointer, pointer, int_, long, pointer, int_),
    }
    for name, types in counts.items():
        function = getattr(library, name)
        function.argtypes = types
        function.restype = long
    library.few_bits_form.argtypes = (int_, int_)
    library.few_bits_form.restype = int_


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the CPU kernels for every kind of processor.")
    parser.add_argument("--prebuilt", action="store_true", help=f"Into {PREBUILT} instead of the cache.")
    folder = PREBUILT if parser.parse_args().prebuilt else default_cache_dir()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for variant in VARIANTS:
        print(build(variant, folder))


if __name__ == "__main__":
    main()
