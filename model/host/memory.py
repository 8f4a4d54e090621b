"""Memory that is available to this process. Reads /proc and the cgroup files; imports no torch, so that
``gemserve info`` and the loaded model answer from the same rules."""

from pathlib import Path

import psutil

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
    """Bytes that this process can still take: what the machine has available, or what is left of the cgroup's
    limit."""
    available = int(psutil.virtual_memory().available)
    for limit_file, usage_file, statistics_file in _LIMITS:
        limit, usage = _read_number(limit_file), _read_number(usage_file)
        if limit is not None and usage is not None:
            available = min(available, max(0, limit - usage + _reclaimable(statistics_file)))
    return available


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
