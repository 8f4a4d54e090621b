"""What the processor computes with: its instruction sets, and the highest that is to be used. Standard
library only."""

import functools
import os
from collections.abc import Mapping
from pathlib import Path

from model.interface.errors import ConfigError

CPU_ISA_VARIABLE = "GEMSERVE_CPU_ISA"
# Instruction sets, lowest first, each with the flags of /proc/cpuinfo that it adds to those before it.
CPU_ISAS: Mapping[str, frozenset[str]] = {
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
    "avx512_vnni": frozenset({"avx512_vnni"}),
    "avx512_bf16": frozenset({"avx512_bf16"}),
    "amx": frozenset({"amx_tile", "amx_int8", "amx_bf16"}),
}


def cpu_computes_bfloat16() -> bool:
    """True where the CPU multiplies bfloat16 matrices natively (AVX512_BF16 or AMX); elsewhere float32 is the
    faster type."""
    return "avx512_bf16" in cpu_flags() or "amx_bf16" in cpu_flags()


def cpu_flags() -> frozenset[str]:
    """The processor's features that may be used, as Linux names them; empty where they are not known.

    The environment variable GEMSERVE_CPU_ISA names the highest set of ``CPU_ISAS`` to use; without it all are
    used. Raises ConfigError for a set that is not known, or that this processor lacks.
    """
    flags = frozenset(processor()[1])
    highest = os.environ.get(CPU_ISA_VARIABLE)
    if not highest:
        return flags
    available = usable_isas(flags)
    if highest not in available:
        raise ConfigError(
            f"{CPU_ISA_VARIABLE}={highest} names no instruction set of this processor. Use one of"
            f" {', '.join(available) or '(none)'}, or leave the variable out."
        )
    names = list(CPU_ISAS)
    return flags.difference(*(CPU_ISAS[name] for name in names[names.index(highest) + 1 :]))


def usable_isas(flags: frozenset[str]) -> list[str]:
    """The sets of ``CPU_ISAS``, lowest first, that a processor with these flags runs: each with all those
    before it."""
    usable = []
    for name, added in CPU_ISAS.items():
        if not added <= flags:
            break
        usable.append(name)
    return usable


@functools.cache
def processor() -> tuple[str, tuple[str, ...]]:
    """The processor's name and its flags, from /proc/cpuinfo; ("", ()) where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "", ()
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return values.get("model name", ""), tuple(values.get("flags", "").split())
