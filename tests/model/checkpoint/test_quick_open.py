"""What makes opening a GGUF quick gives the same as what it replaces: strings without a loop, parts mapped,
not read."""

import mmap
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from model.checkpoint import gguf_header
from model.checkpoint.gguf_checkpoint import _join
from model.checkpoint.gguf_header import _Parser
from model.interface.errors import CheckpointError


def encoded(texts: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(text)) + text for text in texts)


def random_texts(seed: int, count: int = 2000) -> list[bytes]:
    generator = random.Random(seed)
    alphabet = "aé▁漢\n\t🙂\x01\x7f"
    return ["".join(generator.choices(alphabet, k=generator.randint(1, 10))).encode() for _ in range(count)]


def read(
    content: bytes, count: int, monkeypatch: pytest.MonkeyPatch, *, quick: bool
) -> tuple[list[str], int]:
    monkeypatch.setattr(gguf_header, "SHORTEST_QUICK_ARRAY", 1 if quick else 1 << 60)
    parser = _Parser(memoryview(content), "file")
    parser.position = 3
    return parser.strings(count, "tokens"), parser.position


@pytest.mark.parametrize("seed", range(5))
def test_strings_are_read_the_same_without_a_loop(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = random_texts(seed)
    content = b"abc" + encoded(texts) + b"\0" * 100
    quick = read(content, len(texts), monkeypatch, quick=True)
    assert quick == read(content, len(texts), monkeypatch, quick=False)
    assert quick[0] == [text.decode() for text in texts]
    parser = _Parser(memoryview(content), "file")
    parser.position = 3
    monkeypatch.setattr(gguf_header, "SHORTEST_QUICK_ARRAY", 1)
    assert parser.short_strings(len(texts)) == quick[0], "or this test shows nothing"


@pytest.mark.parametrize(
    "unusual",
    [
        b"",
        b"\0",
        b"a\0b",
        b"\0" * 7,
        b"x" * 255,
        b"x" * 256,
        b"y" * 70_000,
        struct.pack("<Q", 3),
        b"\0" * 15 + b"a",
    ],
    ids=repr,
)
@pytest.mark.parametrize("place", [0, 1000, 1999])
def test_unusual_strings_are_read_the_same(
    unusual: bytes, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = random_texts(place)
    texts[place] = unusual
    content = b"abc" + encoded(texts) + encoded(random_texts(7, 100))
    quick = read(content, len(texts), monkeypatch, quick=True)
    assert quick == read(content, len(texts), monkeypatch, quick=False)
    assert quick[0][place] == unusual.decode()


@pytest.mark.parametrize("damage", ["cut", "length", "bytes"])
def test_damaged_strings_are_refused_the_same(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = random_texts(1)
    content = bytearray(b"abc" + encoded(texts))
    if damage == "cut":
        del content[-5:]
    else:
        start = 3 + len(encoded(texts[:1500]))
        content[start + (6 if damage == "length" else 8)] = 0xFF
    messages = []
    for quick in (True, False):
        with pytest.raises(CheckpointError) as refusal:
            read(bytes(content), len(texts), monkeypatch, quick=quick)
        messages.append(str(refusal.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("sizes", [[3, 1, 2], [2, 1], [1], [2, 2.5], [1.5, 2], [0, 1, 0], [0, 0]])
def test_parts_are_joined_whatever_their_sizes(sizes: list[float], tmp_path: Path) -> None:
    """In pages. All but the last must be whole for the parts to be mapped; else they are read."""
    generator = np.random.default_rng(0)
    files, whole = [], b""
    for index, pages in enumerate(sizes):
        content = generator.bytes(int(pages * mmap.PAGESIZE))
        files.append(tmp_path / f"part{index}")
        files[-1].write_bytes(content)
        whole += content
    joined = _join(files)
    assert joined.tobytes() == whole
    inner = joined[10:-10]
    del joined
    assert inner.tobytes() == whole[10:-10]


def test_mapped_parts_cannot_be_written_by_mistake(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(bytes(mmap.PAGESIZE))
    joined = _join([tmp_path / "one", tmp_path / "two"])
    with pytest.raises(ValueError, match="read-only"):
        joined[0] = 1
