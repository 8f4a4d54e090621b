"""The instruction sets whose kernels are tested: those that this processor runs, and in emulation those above
them."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from model.host.cpu_features import CPU_ISA_VARIABLE, processor
from model.host.disk_cache import default_cache_dir
from model.ops.cpu.build import VARIANTS, Variant, build, detect_variant

EMULATION = Path(__file__).with_name("emulate_avx512.h")
LOWEST = VARIANTS[-1]
_VNNI = "avx512_vnni"


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One variant, compiled for its processors, or made of AVX2 instructions, which proves the source, not
    its speed."""

    variant: Variant
    emulated: bool

    def __str__(self) -> str:
        return f"{self.variant.name}-emulated" if self.emulated else self.variant.name

    @contextmanager
    def used(self) -> Iterator[None]:
        """Whoever loads the kernels gets these."""
        with pytest.MonkeyPatch.context() as patch:
            if self.emulated:
                patch.setenv(
                    "GEMSERVE_CPU_KERNELS", str(build(self._emulated_variant(), default_cache_dir()))
                )
            elif "GEMSERVE_CPU_KERNELS" not in os.environ:
                patch.setenv(CPU_ISA_VARIABLE, self.variant.name)
            yield

    def _emulated_variant(self) -> Variant:
        # The digest makes another library of another header. -O0: to optimise a tile of 12 rows of such
        # registers takes the compiler minutes.
        digest = hashlib.sha256(EMULATION.read_bytes()).hexdigest()[:16]
        flags = ["-include", str(EMULATION), f"-DGEMSERVE_EMULATION=0x{digest}ull", "-O0"]
        if self.variant.name == _VNNI:
            flags.append("-DGEMSERVE_EMULATE_VNNI")
        return Variant(LOWEST.name, (*LOWEST.compiler_flags, *flags))


def instruction_sets() -> list[InstructionSet]:
    """Lowest first. A library that was named from outside, and one with sanitizers, is the only one of its
    kind."""
    best = detect_variant()
    if best is None or shutil.which("g++") is None:
        return []
    native = [InstructionSet(variant, False) for variant in reversed(VARIANTS[VARIANTS.index(best) :])]
    if "GEMSERVE_CPU_KERNELS" in os.environ:
        return native[-1:]
    if os.environ.get("GEMSERVE_SANITIZE") == "1":
        return native
    return native + [InstructionSet(variant, True) for variant in reversed(VARIANTS[: VARIANTS.index(best)])]


def report() -> str:
    """The processor's name and what is tested on it, in a line."""
    names = ", ".join(map(str, instruction_sets())) or "none (no g++, or no AVX2)"
    highest = os.environ.get(CPU_ISA_VARIABLE)
    limit = f" up to {CPU_ISA_VARIABLE}={highest}" if highest else ""
    return f"processor: {processor()[0] or 'unknown'}; CPU kernels tested{limit}: {names}"
