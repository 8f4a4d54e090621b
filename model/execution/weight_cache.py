"""Keeps a network's weights on disk as its backend packed them, so that a later start reads them instead of
expanding and packing them again. The key of an entry names everything that it depends on, and its sums are
checked when it is read, so a damaged or outdated one costs a warning and is made again. A disk that is full
or cannot be written costs a log line, never the start. Importing this module imports no torch.

The file is read in a thread, in a few calls outside the interpreter's lock, into memory that the weights then
stay in.
"""

import contextlib
import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import struct
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from model.host.cpu_features import cpu_flags
from model.host.disk_cache import DiskCache
from model.host.huge_pages import anonymous_memory

if TYPE_CHECKING:
    import torch

    from model.checkpoint.base import Checkpoint
    from model.network.gemma3 import Gemma3
    from model.ops.interface import PackedForm

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent.parent
_SOURCE_FILES = ("*.py", "*.cpp", "*.h")
# tests use libraries whose source is not known
_KERNEL_OVERRIDES = frozenset({"GEMSERVE_SANITIZE", "GEMSERVE_CPU_KERNELS"})
SUFFIX = ".weights"
MAGIC = b"gemserve packed1"
_PREFIX = struct.Struct("<16sQQII")  # magic, bytes of the header and of the body, CRC-32 of each
MAX_HEADER_BYTES = 1 << 26
ALIGNMENT = 4096  # alignment of every tensor in the body, and of the body in the file
# Smaller models load in no time. Larger ones wait for the disk either way, and would fill it.
SMALLEST_BYTES, LARGEST_BYTES = 64 << 20, 4 << 30
MAX_TOTAL_BYTES = 8 << 30  # limit of all entries together; the least recently used are removed
FREE_BYTES = 1 << 30  # disk space that stays free beside an entry


def weight_cache_key(checkpoint: "Checkpoint", *, dtype: str, device: str, quantization: str) -> str | None:
    """Hash everything that packed weights depend on: files, settings, this package's sources, torch and the
    processor. None: the weights are not cached."""
    if device == "cuda" or not _KERNEL_OVERRIDES.isdisjoint(os.environ):
        return None
    digest = hashlib.sha256(checkpoint.fingerprint.encode())
    try:
        for file in checkpoint.weight_files:
            status = file.stat()
            digest.update(f"{status.st_size}:{status.st_mtime_ns}\0".encode())
        for source in sorted(file for pattern in _SOURCE_FILES for file in SOURCES.rglob(pattern)):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    except OSError:
        return None
    for value in (dtype, quantization, version("torch"), *sorted(cpu_flags())):
        digest.update(value.encode() + b"\0")
    return digest.hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class _Entry:
    header: dict[str, Any]
    body: mmap.mmap


class _DamagedError(Exception):
    pass


class WeightCache:
    """One entry of the cache. Starts reading it at once, where it exists."""

    def __init__(self, folder: Path, key: str, *, smallest: int = SMALLEST_BYTES) -> None:
        self._cache = DiskCache(folder)
        self._file = folder / f"{key}{SUFFIX}"
        self._smallest = smallest
        self._entry: _Entry | None = None
        self._fault: str | None = None
        self._thread = threading.Thread(target=self._read, name="gemserve-weights", daemon=True)
        with contextlib.suppress(OSError):  # such as a folder of somebody else: ``save`` says why
            if self._file.exists():
                self._thread.start()

    def restore(self, model: "Gemma3") -> bool:
        """Fill the network from the entry. Returns False where there is no fitting entry; the network is then
        unchanged."""
        if self._thread.ident is None:
            return False
        self._thread.join()
        entry, self._entry = self._entry, None
        if not model.ops.stores_packed_weights:
            return False  # the entry is that of starts without a GPU, or with a compiler
        try:
            if entry is None:
                raise _DamagedError(self._fault)
            if not model.restore_weights(_forms(entry)):
                raise _DamagedError("it holds another network")
        except _DamagedError as error:
            logger.warning("The packed weights in %s are not used and are made again: %s.", self._file, error)
            self._cache.discard(self._file.name)
            return False
        with contextlib.suppress(OSError):
            os.utime(self._file)  # records the time of the last use
        return True

    def save(self, model: "Gemma3") -> None:
        """Store the weights of a loaded network, if its backend can take them apart and their size is worth
        storing."""
        if not model.ops.stores_packed_weights:
            return
        forms = model.packed_forms()
        layout = _Layout(forms)
        if not self._smallest <= layout.body_bytes <= LARGEST_BYTES:
            return
        folder, name = self._cache.folder, self._file.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A start that began at the same time; at worst it is written twice.
            if self._file.exists() or self._cache.is_being_written(name):
                logger.info("Packed weights are kept in %s by another start.", folder)
                return
            self._cache.remove_left_overs()
            self._make_room(layout.body_bytes)
            free = shutil.disk_usage(folder).free
            if free < layout.body_bytes + FREE_BYTES:
                logger.info("Packed weights are not kept in %s: only %d MiB are free.", folder, free >> 20)
                return
            logger.info(
                "Keeping packed weights (%d MiB) in %s; later starts read them.",
                layout.body_bytes >> 20,
                folder,
            )
            with self._cache.writing(name) as stream:
                layout.write(stream)
        except OSError as error:
            logger.warning("Packed weights cannot be kept in %s: %s.", folder, error.strerror or error)

    def _make_room(self, needed: int) -> None:
        """Remove the entries used longest ago that leave no room for ``needed`` more bytes."""
        entries = []
        for file in self._cache.folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                entries.append((file.stat(), file))
        room = MAX_TOTAL_BYTES - needed
        for status, file in sorted(entries, key=lambda entry: entry[0].st_mtime, reverse=True):
            room -= status.st_size
            if room < 0:
                self._cache.discard(file.name)

    def _read(self) -> None:
        try:
            with self._file.open("rb", buffering=0) as stream:
                self._entry = _read_entry(stream)
        except _DamagedError as error:
            self._fault = str(error)
        except (OSError, MemoryError, ValueError) as error:
            self._fault = f"it cannot be read ({error})"


class _Layout:
    """The place of each tensor of the forms in the body of an entry."""

    def __init__(self, forms: "dict[str, PackedForm]") -> None:
        self._tensors: list[tuple[int, torch.Tensor]] = []
        self.body_bytes = 0
        self._modules = {
            name: {
                "values": dict(form.values),
                "tensors": {part: self._place(tensor) for part, tensor in form.tensors.items()},
            }
            for name, form in forms.items()
        }

    def _place(self, tensor: "torch.Tensor") -> list[Any]:
        start = self.body_bytes
        self._tensors.append((start, tensor))
        self.body_bytes = _aligned(start + tensor.nbytes)
        return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start]

    @cached_property
    def header(self) -> bytes:
        return json.dumps(self._modules).encode()

    def write(self, stream: BinaryIO) -> None:
        stream.seek(_body_start(len(self.header)))
        checksum = 0
        for piece in self._pieces():
            stream.write(piece)
            checksum = zlib.crc32(piece, checksum)
        stream.seek(0)
        stream.write(
            _PREFIX.pack(MAGIC, len(self.header), self.body_bytes, zlib.crc32(self.header), checksum)
        )
        stream.write(self.header)

    def _pieces(self) -> Iterator[memoryview]:
        import torch

        for start, tensor in self._tensors:
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            yield flat.numpy().data
            yield memoryview(bytes(_aligned(start + tensor.nbytes) - start - tensor.nbytes))


def _read_entry(stream: Any) -> _Entry:
    size = os.fstat(stream.fileno()).st_size
    prefix = stream.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise _DamagedError("the file is truncated")
    magic, header_bytes, body_bytes, header_sum, body_sum = _PREFIX.unpack(prefix)
    if (
        magic != MAGIC
        or header_bytes > MAX_HEADER_BYTES
        or size != _body_start(header_bytes) + body_bytes
        or not body_bytes
    ):
        raise _DamagedError("its first bytes and its length are not those of such a file")
    header = stream.read(header_bytes)
    if zlib.crc32(header) != header_sum:
        raise _DamagedError("the checksum of its header is wrong")
    stream.seek(_body_start(header_bytes))
    body = anonymous_memory(body_bytes)
    view, filled = memoryview(body), 0
    while filled < body_bytes:
        count = stream.readinto(view[filled:])
        if not count:
            raise _DamagedError("the file is truncated")
        filled += count
    if zlib.crc32(view) != body_sum:
        raise _DamagedError("the checksum of its weights is wrong")
    return _Entry(json.loads(header), body)


def _forms(entry: _Entry) -> "dict[str, PackedForm]":
    """Rebuild the forms of an entry whose checksums are right; their tensors share its memory."""
    import torch

    from model.ops.interface import PackedForm

    def tensor(dtype: str, shape: list[int], start: int) -> torch.Tensor:
        return torch.frombuffer(
            entry.body, dtype=getattr(torch, dtype), count=math.prod(shape), offset=start
        ).view(shape)

    return {
        name: PackedForm(
            module["values"], {part: tensor(*place) for part, place in module["tensors"].items()}
        )
        for name, module in entry.header.items()
    }


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _body_start(header_bytes: int) -> int:
    return _aligned(_PREFIX.size + header_bytes)
