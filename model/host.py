"""What the host offers (memory that is available to this process, memory in huge pages), and what a --quantization means. Reads
/proc and the cgroup files; imports no torch, so that ``gemserve info`` and the loaded model answer from the same rules."""

import contextlib
import mmap
import sys
from pathlib import Path

import psutil

from model.errors import ConfigError

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (  # (limit, usage, statistics with the reclaimable page cache) of cgroup versions 2 and 1
    (_CGROUP / "memory.max", _CGROUP / "memory.current", _CGROUP / "memory.stat"),
    (
        _CGROUP / "memory/memory.limit_in_bytes",
        _CGROUP / "memory/memory.usage_in_bytes",
        _CGROUP / "memory/memory.stat",
    ),
)


def available_memory() -> int:
    """Bytes that this process can still take: what the machine has available, or what is left of the cgroup's limit."""
    available = int(psutil.virtual_memory().available)
    for limit_file, usage_file, statistics_file in _LIMITS:
        limit, usage = _read_number(limit_file), _read_number(usage_file)
        if limit is not None and usage is not None:
            available = min(available, max(0, limit - usage + _reclaimable(statistics_file)))
    return available


def anonymous_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed memory of its own, in huge pages as far as the system has them."""
    if sys.platform != "linux":
        return mmap.mmap(-1, num_bytes)
    # Private: shared memory, which is Python's default, gets no huge pages on most systems.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class HugePageMemory:
    """Hands out memory from large pieces in huge pages. Most weights of a block are smaller than a page or two of them and would
    get none; then every 4 KiB cost a walk through page tables and end what the processor fetches ahead."""

    PIECE_BYTES = 32 << 20
    ALIGNMENT = 64

    def __init__(self) -> None:
        self._piece = memoryview(b"")

    def take(self, num_bytes: int) -> memoryview:
        """Zeroed, aligned to a cache line; it lives as long as what refers to it."""
        size = max(1, -(-num_bytes // self.ALIGNMENT)) * self.ALIGNMENT
        if size > len(self._piece):
            self._piece = memoryview(anonymous_memory(max(size, self.PIECE_BYTES)))
        taken, self._piece = self._piece[:num_bytes], self._piece[size:]
        return taken


def resolve_quantization(quantization: str, dtype: str) -> str:
    """What a --quantization value means: "auto" is "none" where a --dtype asks for the weights as they are."""
    if quantization not in ("auto", "none", "int8", "int4", "fp8"):
        raise ConfigError(f"--quantization {quantization} is not supported. Use int8, int4, fp8, none or auto.")
    return "none" if quantization == "auto" and dtype != "auto" else quantization


def _read_number(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit


def _reclaimable(statistics_file: Path) -> int:
    """Page cache that the kernel drops under pressure; counted as usage, though it is free to take."""
    try:
        lines = statistics_file.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    values = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return int(values.get("inactive_file", 0))
