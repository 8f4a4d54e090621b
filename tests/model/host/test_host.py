"""What the host gives: memory within its limits, instruction sets in their order, pieces of huge pages."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from model.host import cpu_features, memory
from model.host.cpu_features import CPU_ISAS, usable_isas
from model.host.huge_pages import HugePageMemory
from model.interface.errors import ConfigError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("limit", "usage", "statistics", "expected"),
    [
        ("max", "5", "", 8 * GIB),
        (str(4 * GIB), str(GIB), "", 3 * GIB),
        (str(4 * GIB), str(4 * GIB), f"inactive_file {GIB}\nactive_file 7", GIB),
        (str(4 * GIB), str(5 * GIB), "", 0),
        (str(64 * GIB), "0", "", 8 * GIB),
        (None, None, None, 8 * GIB),
    ],
)
def test_memory_is_what_the_machine_and_the_cgroup_leave(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    limit: str | None,
    usage: str | None,
    statistics: str | None,
    expected: int,
) -> None:
    files = []
    for name, content in (("max", limit), ("current", usage), ("stat", statistics)):
        files.append(tmp_path / name)
        if content is not None:
            files[-1].write_text(content, encoding="ascii")
    monkeypatch.setattr(memory, "_LIMITS", (tuple(files),))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    assert memory.available_memory() == expected


def test_an_instruction_set_needs_all_those_before_it() -> None:
    everything = frozenset().union(*CPU_ISAS.values())
    assert usable_isas(everything) == list(CPU_ISAS)
    assert usable_isas(everything - {"avx512_vnni"}) == ["avx2", "avx512"]
    assert usable_isas(frozenset()) == []


def test_the_highest_set_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = CPU_ISAS["avx2"] | CPU_ISAS["avx512"] | {"sse2"}
    monkeypatch.setattr(cpu_features, "processor", lambda: ("a processor", tuple(flags)))
    monkeypatch.setenv("GEMSERVE_CPU_ISA", "avx2")
    assert cpu_features.cpu_flags() == CPU_ISAS["avx2"] | {"sse2"}
    monkeypatch.setenv("GEMSERVE_CPU_ISA", "")
    assert cpu_features.cpu_flags() == flags
    for unknown in ("amx", "sse"):
        monkeypatch.setenv("GEMSERVE_CPU_ISA", unknown)
        with pytest.raises(ConfigError, match="Use one of avx2, avx512, or"):
            cpu_features.cpu_flags()


def test_pieces_are_aligned_zeroed_and_their_own() -> None:
    memory_of_pages = HugePageMemory()
    taken = [memory_of_pages.take(size) for size in (1, 65, 100, HugePageMemory.PIECE_BYTES + 1)]
    for index, piece in enumerate(taken):
        assert not any(piece[:100])
        piece[:] = bytes([index + 1]) * len(piece)
    for index, piece in enumerate(taken):
        assert set(piece[:200]) == {index + 1}
