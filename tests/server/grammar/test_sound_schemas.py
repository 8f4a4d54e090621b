"""Schemas that were found to be sound."""

from typing import Any

from server.grammar.sound_schemas import SoundSchemas

SCHEMAS: list[dict[str, Any]] = [{"properties": {name: {}}} for name in "abc"]
A, B, C = SCHEMAS


def test_known_by_their_content() -> None:
    known = SoundSchemas()
    assert known.unknown([A, B, A]) == [0, 1, 2]
    known.add(A)
    assert known.unknown([A, B, {"properties": {"a": {}}}]) == [1]
    assert known.unknown([{"properties": {"a": {"type": "string"}}}]) == [0]


def test_those_that_were_used_last_stay() -> None:
    known = SoundSchemas(limit=2)
    known.add(A)
    known.add(B)
    assert known.unknown([A]) == []
    known.add(C)
    assert known.unknown([A, B, C]) == [1]
