"""Broken and hostile GGUF files end in a clean error that names the file, in bounded time and memory: no
crash, no hang."""

import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from model.checkpoint.base import Checkpoint
from model.checkpoint.gguf_header import MAX_ARRAY_STRINGS, GGUFHeader, parse_header
from model.checkpoint.open import open_checkpoint
from model.interface.errors import CheckpointError, ModelError
from tests.model.checkpoint.conftest import random_weights, write_gguf

Open = Callable[[Path], Checkpoint]
SECONDS = 2.0
MEMORY_BYTES = 64 << 20
UINT32, STRING, ARRAY = 4, 8, 9
F32, Q4_0 = 0, 2


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def entry(key: bytes, value_type: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", value_type) + value


def array(element_type: int, length: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", element_type, length) + content


def tensor(
    name: bytes = b"t",
    dimensions: tuple[int, ...] = (32,),
    kind: int = F32,
    offset: int = 0,
    count: int | None = None,
) -> bytes:
    number = len(dimensions) if count is None else count
    return (
        string(name)
        + struct.pack("<I", number)
        + struct.pack(f"<{len(dimensions)}QIQ", *dimensions, kind, offset)
    )


def header(
    entries: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_entries: int | None = None,
    data: int = 128,
) -> bytes:
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(entries) if num_entries is None else num_entries,
    )
    content = magic + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(tensors)
    return content + b"\0" * (-len(content) % 32 + data)


def parse(content: bytes) -> GGUFHeader:
    return parse_header(memoryview(content), "bad.gguf")


def test_the_builder_of_these_tests_makes_valid_files() -> None:
    parsed = parse(
        header((entry(b"a", UINT32, struct.pack("<I", 7)), entry(b"b", STRING, string(b"x"))), (tensor(),))
    )
    assert parsed.metadata == {"a": 7, "b": "x"}
    assert parsed.tensors["t"].shape == (32,)
    assert (
        parse(header((), (tensor(dimensions=(64, 2), kind=Q4_0),), version=2)).tensors["t"].num_bytes
        == 2 * 2 * 18
    )


HOSTILE = {
    "wrong magic": (header(magic=b"GGML"), "wrong magic"),
    "version 1": (header(version=1), "version 1 "),
    "version 99": (header(version=99), "version 99 "),
    "big endian": (header(version=3 << 24), "big endian"),
    "huge number of tensors": (header(num_tensors=2**63), "number of tensors"),
    "more tensors than bytes": (header(num_tensors=60_000), "number of tensors"),
    "huge number of entries": (header(num_entries=2**64 - 1), "number of metadata entries"),
    "key of 2**63 bytes": (header((struct.pack("<Q", 2**63),), num_entries=1), "metadata key"),
    "string of 2**63 bytes": (
        header((entry(b"k", STRING, struct.pack("<Q", 2**63)),)),
        "'k'.*9223372036854775808",
    ),
    "string past the end": (header((entry(b"k", STRING, struct.pack("<Q", 5000)),)), "'k'.*5000"),
    "string that is not UTF-8": (header((entry(b"k", STRING, string(b"\xff")),)), "'k'.*UTF-8"),
    "array of 2**63 strings": (header((entry(b"k", ARRAY, array(STRING, 2**63)),)), "'k'"),
    "array of too many strings": (header((entry(b"k", ARRAY, array(STRING, 2**20)),)), "'k'"),
    "array of 2**62 numbers": (header((entry(b"k", ARRAY, array(UINT32, 2**62)),)), "'k'"),
    "array whose second string is endless": (
        header((entry(b"k", ARRAY, array(STRING, 2, string(b"a") + struct.pack("<Q", 2**64 - 1))),)),
        "'k': element 1",
    ),
    "array with a string that is not UTF-8": (
        header((entry(b"k", ARRAY, array(STRING, 1, string(b"\xff"))),)),
        "'k': element 0",
    ),
    "nested arrays": (header((entry(b"k", ARRAY, array(ARRAY, 1) * 50),)), "'k'.*nested"),
    "unknown value type": (header((entry(b"k", 13, b""),)), "'k'.*13"),
    "unknown element type": (header((entry(b"k", ARRAY, array(77, 1)),)), "'k'.*77"),
    "a key twice": (header((entry(b"k", UINT32, b"\0" * 4),) * 2), "'k' stands twice"),
    "alignment 0": (header((entry(b"general.alignment", UINT32, b"\0" * 4),)), "general.alignment"),
    "alignment 24": (
        header((entry(b"general.alignment", UINT32, struct.pack("<I", 24)),)),
        "general.alignment",
    ),
    "alignment 2**31": (
        header((entry(b"general.alignment", UINT32, struct.pack("<I", 2**31)),)),
        "general.alignment",
    ),
    "alignment of another type": (
        header((entry(b"general.alignment", STRING, string(b"32")),)),
        "general.alignment",
    ),
    "n_dims 0xFFFFFFFF": (header((), (tensor(count=0xFFFFFFFF),)), "'t'.*4294967295 dimensions"),
    "no dimensions": (header((), (tensor(dimensions=()),)), "'t'.*0 dimensions"),
    "five dimensions": (header((), (tensor(dimensions=(1,) * 5),)), "'t'.*5 dimensions"),
    "dimension 0": (header((), (tensor(dimensions=(32, 0)),)), "'t'.*dimensions"),
    "dimension 2**63": (header((), (tensor(dimensions=(2**63,)),)), "'t'.*dimensions"),
    "dimensions that overflow": (header((), (tensor(dimensions=(2**32, 2**32)),)), "'t'.*dimensions"),
    "dimensions that overflow to a small number": (
        header((), (tensor(dimensions=(2**32, 2**32, 32, 1)),)),
        "'t'.*dimensions",
    ),
    "rows that are not whole blocks": (
        header((), (tensor(dimensions=(33,), kind=Q4_0),)),
        "'t'.*whole blocks",
    ),
    "unknown quantisation": (header((), (tensor(kind=9999),)), "'t'.*9999"),
    "removed quantisation": (header((), (tensor(kind=4),)), "'t'.* 4 "),
    "offset past the end": (header((), (tensor(offset=1 << 20),)), "'t'.*file has"),
    "offset that overflows": (header((), (tensor(offset=2**64 - 32),)), "'t'.*file has"),
    "offset that is not aligned": (header((), (tensor(offset=5),)), "'t'.*alignment"),
    "data past the end": (header((), (tensor(dimensions=(4096,)),)), "'t'.*truncated"),
    "a tensor twice": (header((), (tensor(), tensor())), "'t' stands twice"),
    "overlapping data": (header((), (tensor(), tensor(name=b"u", offset=32)), data=512), "'u'.*overlaps"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_by_name_in_bounded_time_and_memory(name: str) -> None:
    content, named = HOSTILE[name]
    tracemalloc.start()
    try:
        start = time.process_time()
        with pytest.raises(CheckpointError, match=f"bad.gguf: .*{named}"):
            parse(content)
        assert time.process_time() - start < SECONDS
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES
    finally:
        tracemalloc.stop()


def test_many_arrays_of_empty_strings_share_one_budget() -> None:
    """Each array alone is small; together they would keep a Python loop busy for minutes."""
    half = MAX_ARRAY_STRINGS // 2
    entries = tuple(
        entry(b"k%d" % index, ARRAY, array(STRING, half, b"\0" * (8 * half))) for index in range(3)
    )
    with pytest.raises(CheckpointError, match="k2"):
        parse(header(entries))


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("whole") / "tiny.gguf", random_weights())


@pytest.mark.parametrize("cut", ["0", "3", "8", "1000", "half", "last 32"])
def test_a_cut_file_is_refused(cut: str, whole_file: Path, tmp_path: Path, opened: Open) -> None:
    content = whole_file.read_bytes()
    length = (
        {"half": len(content) // 2, "last 32": len(content) - 32}.get(cut)
        if not cut.isdecimal()
        else int(cut)
    )
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[:length])
    with pytest.raises(CheckpointError, match=r"cut\.gguf"):
        opened(path)


def test_flipped_bytes_give_a_clean_error_or_a_working_checkpoint(whole_file: Path, tmp_path: Path) -> None:
    """Sampled over the first 4 kB and over the table of tensors; a flip inside a token's text is harmless and
    may load."""
    content = bytearray(whole_file.read_bytes())
    random_source = random.Random(67)
    table = content.index(b"token_embd.weight")
    positions = [
        *random_source.sample(range(4096), 250),
        *random_source.sample(range(table, table + 4096), 150),
    ]
    path = tmp_path / "flipped.gguf"
    messages: list[str] = []
    for position in positions:
        original = content[position]
        content[position] ^= random_source.choice((0x01, 0x80, 0xFF))
        path.write_bytes(content)
        start = time.process_time()
        try:
            checkpoint = open_checkpoint(str(path), cache_dir=tmp_path, progress=False)
            assert checkpoint.tokenizer_file.is_file()
            checkpoint.close()
        except ModelError as error:
            messages.append(str(error))
        assert time.process_time() - start < SECONDS, position
        content[position] = original
    assert len(messages) > len(positions) // 4
    assert all("flipped.gguf" in message for message in messages)


def test_a_truncated_part_of_the_embedded_model_is_named(
    tmp_path: Path, whole_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = whole_file.read_bytes()
    parts = [tmp_path / "model.part00", tmp_path / "model.part01"]
    parts[0].write_bytes(content[:50_000])
    parts[1].write_bytes(content[50_000:])
    monkeypatch.setattr("model.checkpoint.open._embedded_parts", lambda: parts)
    with_parts = open_checkpoint(None, cache_dir=tmp_path, progress=False)
    assert with_parts.name == "gemma-3-270m"
    assert sum(1 for _ in with_parts.tensors()) == 13 * 7 + 2
    os.truncate(parts[1], len(content) - 50_032)
    with pytest.raises(CheckpointError, match=r"model\.part00 and 1 more parts: .*truncated"):
        open_checkpoint(None, cache_dir=tmp_path, progress=False)
    parts[0].unlink()
    with pytest.raises(CheckpointError, match=r"model\.part00.*cannot be read"):
        open_checkpoint(None, cache_dir=tmp_path, progress=False)
