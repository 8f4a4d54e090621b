"""Strict, bounded parser of a GGUF header (versions 2 and 3, little endian): metadata and the table of
tensors, no tensor data.

The file is hostile until proven otherwise. Every count, length and offset is checked against the bytes that
are left before anything is allocated, and counts have caps far beyond every real file, so that a damaged
header ends in a CheckpointError naming file and field, in time and memory bounded by the size of the file.
Imports no torch.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from model.interface.errors import CheckpointError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_METADATA_ENTRIES = 1 << 16
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 4
MAX_DIMENSION = 1 << 40
MAX_NAME_BYTES = 1 << 16
MAX_STRING_BYTES = 1 << 24
MAX_NUMERIC_ARRAY = 1 << 24  # elements of one array
SHORTEST_QUICK_ARRAY = 1024
MAX_ARRAY_STRINGS = 1 << 20  # strings of all arrays of the file together: they are what costs time in Python

_SCALARS: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "<u1",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
_UINT32 = struct.Struct("<I")
_UINT64 = struct.Struct("<Q")

Buffer = memoryview
_Enum = TypeVar("_Enum", GGUFValueType, GGMLQuantizationType)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file. ``shape`` is row-major, as in torch; the last axis holds whole quantisation
    blocks."""

    name: str
    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    start: int  # absolute offset of the data
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What stands before the data. Arrays of strings are lists, arrays of numbers numpy arrays."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    header_bytes: int  # the metadata and the table of tensors, without padding
    data_start: int


def parse_header(buffer: Buffer, file: str) -> GGUFHeader:
    """Parse the header of a whole mapped file. ``file`` names it in errors (CheckpointError)."""
    return _Parser(buffer, file).parse()


class _Parser:
    def __init__(self, buffer: Buffer, file: str) -> None:
        self.buffer = buffer
        self.size = len(buffer)
        self.file = file
        self.position = 0
        self.strings_left = MAX_ARRAY_STRINGS

    def parse(self) -> GGUFHeader:
        if bytes(self.buffer[:4]) != MAGIC:
            raise self.error("this is not a GGUF file (wrong magic)")
        self.position = 4
        version = self.uint32("version")
        if version not in SUPPORTED_VERSIONS:
            hint = ", big endian" if version & 0xFFFF == 0 and version else ""
            raise self.error(
                f"GGUF version {version}{hint} is not supported; supported are 2 and 3, little endian"
            )
        num_tensors = self.count("number of tensors", MAX_TENSORS, smallest=25)
        num_entries = self.count("number of metadata entries", MAX_METADATA_ENTRIES, smallest=13)
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self.string("metadata key", MAX_NAME_BYTES)
            if key in metadata:
                raise self.error(f"metadata key {key!r:.80} stands twice")
            metadata[key] = self.value(key)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        power_of_two = (
            type(alignment) is int and 1 <= alignment <= MAX_ALIGNMENT and alignment & (alignment - 1) == 0
        )
        if not power_of_two:
            raise self.error(
                f"general.alignment must be a power of two in 1..{MAX_ALIGNMENT}, not {alignment!r:.80}"
            )
        infos = [self.tensor_info() for _ in range(num_tensors)]
        header_bytes = self.position
        data_start = -(-header_bytes // alignment) * alignment
        return GGUFHeader(
            version, metadata, self.place(infos, data_start, alignment), header_bytes, data_start
        )

    def place(self, infos: list[TensorInfo], data_start: int, alignment: int) -> dict[str, TensorInfo]:
        """Turn relative offsets into absolute ones; every tensor lies inside the file and none overlaps
        another."""
        tensors: dict[str, TensorInfo] = {}
        for info in infos:
            start = data_start + info.start
            if info.start % alignment:
                raise self.error(
                    f"tensor {info.name!r}: offset {info.start} is not a multiple of the "
                    f"alignment {alignment}"
                )
            if start + info.num_bytes > self.size:
                raise self.error(
                    f"tensor {info.name!r}: its data ends at byte {start + info.num_bytes}, but the file has "
                    f"{self.size}; the file is truncated or damaged, fetch it again"
                )
            if info.name in tensors:
                raise self.error(f"tensor {info.name!r} stands twice")
            tensors[info.name] = TensorInfo(info.name, info.shape, info.quantization, start, info.num_bytes)
        end = 0
        for info in sorted(tensors.values(), key=lambda tensor: tensor.start):
            if info.start < end:
                raise self.error(f"tensor {info.name!r}: its data overlaps another tensor's")
            end = info.start + info.num_bytes
        return tensors

    def tensor_info(self) -> TensorInfo:
        name = self.string("tensor name", MAX_NAME_BYTES)
        label = f"tensor {name!r:.120}"
        num_dimensions = self.uint32(label)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self.error(f"{label}: {num_dimensions} dimensions; 1..{MAX_DIMENSIONS} are supported")
        dimensions = [self.uint64(label) for _ in range(num_dimensions)]
        quantization = self.member(GGMLQuantizationType, self.uint32(label), f"{label}: quantisation type")
        offset = self.uint64(label)
        num_elements = 1
        for dimension in dimensions:
            num_elements *= dimension
            if not 1 <= dimension <= MAX_DIMENSION or num_elements > MAX_DIMENSION:
                raise self.error(f"{label}: dimensions {dimensions} are not possible")
        if quantization not in GGML_QUANT_SIZES:
            raise self.error(f"{label}: the block size of type {quantization.name} is not known")
        block_elements, block_bytes = GGML_QUANT_SIZES[quantization]
        if dimensions[0] % block_elements:
            raise self.error(
                f"{label}: rows of {dimensions[0]} are not whole blocks of {quantization.name} "
                f"({block_elements})"
            )
        num_bytes = num_elements // block_elements * block_bytes
        return TensorInfo(name, tuple(reversed(dimensions)), quantization, offset, num_bytes)

    def value(self, key: str) -> Any:
        label = f"metadata {key!r:.120}"
        value_type = self.member(GGUFValueType, self.uint32(label), f"{label}: value type")
        if value_type is GGUFValueType.STRING:
            return self.string(label, MAX_STRING_BYTES)
        if value_type is GGUFValueType.ARRAY:
            return self.array(label)
        raw = self.take(np.dtype(_SCALARS[value_type]).itemsize, label)
        value = np.frombuffer(raw, dtype=_SCALARS[value_type])[0]
        if value_type is GGUFValueType.BOOL:
            return bool(value)
        # 1e-6 stored in float32 reads as 1e-6, not as 9.999999974752427e-07: the shortest decimal of that
        # float32.
        return float(str(value)) if value_type is GGUFValueType.FLOAT32 else value.item()

    def array(self, label: str) -> Any:
        value_type = self.member(GGUFValueType, self.uint32(label), f"{label}: element type")
        if value_type is GGUFValueType.ARRAY:
            raise self.error(f"{label}: nested arrays are not supported")
        if value_type is GGUFValueType.STRING:
            length = self.count(f"{label}: length", self.strings_left, smallest=8)
            self.strings_left -= length
            return self.strings(length, label)
        dtype = np.dtype(_SCALARS[value_type])
        length = self.count(f"{label}: length", MAX_NUMERIC_ARRAY, smallest=dtype.itemsize)
        array = np.frombuffer(self.take(length * dtype.itemsize, label), dtype=dtype)
        # A copy, so that nothing keeps the mapping of the file alive.
        return array.astype(np.bool_) if value_type is GGUFValueType.BOOL else array.copy()

    def strings(self, length: int, label: str) -> list[str]:
        if (quick := self.short_strings(length)) is not None:
            return quick
        buffer, size, position = self.buffer, self.size, self.position
        unpack: Callable[..., tuple[int]] = _UINT64.unpack_from
        values: list[str] = []
        append = values.append
        try:
            for _ in range(length):
                start = position + 8
                if start > size:
                    raise self.error(f"{label}: the file ends inside it")
                position = start + unpack(buffer, position)[0]
                if position > size or position - start > MAX_STRING_BYTES:
                    raise self.error(
                        f"{label}: element {len(values)} has the impossible length {position - start}"
                    )
                append(str(buffer[start:position], "utf-8"))
        except UnicodeDecodeError:
            raise self.error(f"{label}: element {len(values)} is not valid UTF-8") from None
        self.position = position
        return values

    def short_strings(self, length: int) -> list[str] | None:
        """The same for a vocabulary of 262,144 tokens, several times faster. None: the strings are not what
        is assumed here.

        A string shorter than 256 bytes stands behind a byte for its length and seven zeros, and text holds no
        zeros. So zeros show where each string begins, and that all of them follow one another without a gap
        proves it.
        """
        if length < SHORTEST_QUICK_ARRAY:
            return None
        window = np.frombuffer(self.buffer[self.position :][: length * 32], dtype=np.uint8)
        is_zero = window == 0
        two = is_zero[:-1] & is_zero[1:]
        four = two[:-2] & two[2:]
        firsts = np.flatnonzero(four[:-3] & four[3:])  # of seven in a row; the byte before is the length
        # of the length of each string, and where the last one ends
        starts = np.empty(length + 1, dtype=np.int64)
        if len(firsts) < length or firsts[0] != 1:
            return None
        starts[:-1] = firsts[:length] - 1
        starts[1:] = starts[:-1] + 8 + window[starts[:-1]]
        if starts[-1] > len(window) or not np.array_equal(starts[:-1], firsts[:length] - 1):
            return None
        if np.count_nonzero(is_zero[: starts[-1]]) != 7 * length:
            return None
        is_kept = ~is_zero[: starts[-1]]
        is_kept[starts[:-1]] = False
        is_kept[starts[:-1] + 1] = True  # one zero of each, to split at
        try:
            values: list[str] = window[: starts[-1]][is_kept].tobytes().decode("utf-8").split("\0")
        except UnicodeDecodeError:
            return None
        if len(values) != length + 1:
            return None
        self.position += int(starts[-1])
        return values[1:]

    def string(self, label: str, limit: int) -> str:
        length = self.uint64(label)
        if length > limit or length > self.size - self.position:
            raise self.error(f"{label}: impossible string length {length}")
        try:
            return str(self.take(length, label), "utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{label}: not valid UTF-8") from None

    def count(self, label: str, limit: int, *, smallest: int) -> int:
        """A number of things of at least ``smallest`` bytes each, which must fit into what is left of the
        file."""
        count = self.uint64(label)
        if count > limit or count * smallest > self.size - self.position:
            raise self.error(
                f"{label}: {count} is more than the file can hold or than is supported ({limit})"
            )
        return count

    def member(self, enum: type[_Enum], value: int, label: str) -> _Enum:
        try:
            return enum(value)
        except ValueError:
            raise self.error(f"{label} {value} is not known") from None

    def uint32(self, label: str) -> int:
        return int(_UINT32.unpack(self.take(4, label))[0])

    def uint64(self, label: str) -> int:
        return int(_UINT64.unpack(self.take(8, label))[0])

    def take(self, length: int, label: str) -> Buffer:
        start, end = self.position, self.position + length
        if end > self.size:
            raise self.error(f"{label}: the file ends inside it; it is truncated, fetch it again")
        self.position = end
        return self.buffer[start:end]

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {text}.")
