"""Bounded reader of safetensors headers: which tensors a file holds, in which type and shape, and that their
data lies inside the file. No data is read. Damage ends in a CheckpointError naming file and tensor. Imports
no torch.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.interface.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
DTYPE_BYTES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def read_json_object(content: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object; anything else is a CheckpointError."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: is not valid JSON ({str(error)[:120]}).") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: must hold a JSON object.")
    return value


def read_safetensors_header(file: Path) -> tuple[bytes, dict[str, StoredTensor]]:
    """The raw header and the tensors of a file. Types are not judged here: a tensor that is skipped may have
    any."""
    size, header = _raw_header(file)
    data_bytes = size - 8 - len(header)
    tensors: dict[str, StoredTensor] = {}
    for name, entry in read_json_object(header, f"{file}: header").items():
        if name == "__metadata__":
            continue
        label = f"{file}: tensor {name!r:.200}"
        try:
            dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise CheckpointError(f"{label}: its entry in the header is damaged.") from None
        numbers = (start, end, *shape) if isinstance(shape, list) else (None,)
        if not isinstance(dtype, str) or any(type(number) is not int or number < 0 for number in numbers):
            raise CheckpointError(f"{label}: its entry in the header is damaged.")
        if start > end or end > data_bytes:
            raise CheckpointError(
                f"{label}: its data ends at byte {8 + len(header) + end}, but the file has {size}; "
                "it is truncated, fetch it again."
            )
        if (width := DTYPE_BYTES.get(dtype)) is not None and end - start != _num_elements(shape) * width:
            raise CheckpointError(f"{label}: {end - start} bytes do not fit shape {shape} in {dtype}.")
        tensors[name] = StoredTensor(file, name, dtype, tuple(shape), end - start)
    return header, tensors


def _raw_header(file: Path) -> tuple[int, bytes]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{file}: is not a safetensors file, or it is truncated ({size} bytes)."
                )
            return size, stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}.") from error


def _num_elements(shape: list[int]) -> int:
    if len(shape) > 8:
        return -1
    count = 1
    for dimension in shape:
        count *= dimension
    return count
