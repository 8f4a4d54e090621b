"""The records that Python and C++ share have the same sizes, and a library of other sizes is refused."""

import ctypes

import pytest

from model.ops.cpu.build import load_library
from model.ops.cpu.records import RECORDS, AttentionArguments, check_sizes
from tests.model.ops.cpu.harness import every_instruction_set

pytestmark = every_instruction_set


def test_sizes_are_those_of_the_library() -> None:
    library = load_library()
    check_sizes(library)
    assert library.record_size(-1) == library.record_size(len(RECORDS)) == 0


def test_a_record_with_a_field_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(AttentionArguments):
        _fields_ = (("one_more", ctypes.c_int64),)

    monkeypatch.setattr("model.ops.cpu.records.RECORDS", (Longer, *RECORDS[1:]))
    with pytest.raises(RuntimeError, match=r"Longer has 184 bytes .* but 176 in the compiled kernels"):
        check_sizes(load_library())
