"""A checkpoint in one GGUF file: configuration, vocabulary and weights of mixed quantisation types. The
header is parsed strictly (gguf_header), names and shapes are checked before any weight is read, and
``tensors()`` dequantises to float32 in row slices.

GGUF stores Gemma's norm weights with the 1 already added; here it is subtracted again, in float32.
"""

import ctypes
import hashlib
import math
import mmap
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, LlamaFileType

from model.checkpoint.base import check_tensors, require_complete, sampled_fingerprint
from model.checkpoint.dequantize import dequantize_rows, package_dequantize
from model.checkpoint.gguf_header import GGUFHeader, TensorInfo, parse_header
from model.checkpoint.gguf_tokenizer import CONVERTER_VERSION, build_tokenizer_json, check_vocabulary
from model.checkpoint.tokenizer_cache import cached_tokenizer
from model.config.gemma3_config import Gemma3Config
from model.config.tensors import EMBEDDING, FINAL_NORM, HEAD, checkpoint_tensors
from model.interface.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_MAP_FIXED = 0x10  # of Linux on all its processors; the module mmap does not name it
MAX_THREADS = min(8, os.cpu_count() or 1)  # numpy computes outside the interpreter lock

_TOP_LEVEL = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": FINAL_NORM,
    "output.weight": HEAD,
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def canonical_name(gguf_name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown name is returned as it is."""
    if gguf_name in _TOP_LEVEL:
        return _TOP_LEVEL[gguf_name]
    parts = gguf_name.split(".")
    if (
        len(parts) == 4
        and parts[0] == "blk"
        and parts[1].isdecimal()
        and parts[2] in _LAYER
        and parts[3] == "weight"
    ):
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.weight"
    return gguf_name


def open_gguf(files: Sequence[Path], *, name: str, cache_dir: Path, progress: bool) -> "GGUFCheckpoint":
    """Open a GGUF file, or one that is cut into several parts (mapped one after the other)."""
    label = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more parts"
    try:
        data = _map(files[0]) if len(files) == 1 else _join(files)
    except OSError as error:
        raise CheckpointError(f"{label}: cannot be read: {error.strerror or error}.") from error
    return GGUFCheckpoint(data, label, files, name=name, cache_dir=cache_dir, progress=progress)


class GGUFCheckpoint:
    """Implements ``Checkpoint`` on the bytes of a GGUF file."""

    def __init__(
        self, data: Bytes, file: str, files: Sequence[Path], *, name: str, cache_dir: Path, progress: bool
    ) -> None:
        self._data = data
        self.weight_files = tuple(files)
        self._file = file
        self._cache_dir = cache_dir
        self._progress = progress
        self._header: GGUFHeader = parse_header(data.data, file)
        self._infos: dict[str, TensorInfo] = {}
        self.name = name
        self.default_sampling: dict[str, Any] = {}
        self.config = self._checked_config()
        template = self._header.metadata.get("tokenizer.chat_template")
        self.chat_template: str | None = template if isinstance(template, str) else None

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the files again; what is mapped does not travel."""
        arguments: dict[str, Any] = {
            "name": self.name,
            "cache_dir": self._cache_dir,
            "progress": self._progress,
        }
        return partial(open_gguf, self.weight_files, **arguments), ()

    def _checked_config(self) -> Gemma3Config:
        metadata = self._header.metadata
        if metadata.get("split.count", 1) != 1:
            raise CheckpointError(
                f"{self._file}: is one piece of a split model; join the pieces with llama-gguf-split --merge."
            )
        try:
            config = Gemma3Config.from_gguf(metadata)
        except ConfigError as error:
            raise ConfigError(f"{self._file}: {error}") from error
        self._require_dequantizable()
        for info in self._header.tensors.values():
            name = canonical_name(info.name)
            if name in self._infos:
                raise CheckpointError(
                    f"{self._file}: tensors {self._infos[name].name!r} and {info.name!r} are the same weight."
                )
            self._infos[name] = info
        embedding = self._infos.get(EMBEDDING)
        if embedding is not None and len(embedding.shape) == 2 and embedding.shape[0] != config.vocab_size:
            raise CheckpointError(
                f"{self._file}: tensor 'token_embd.weight' has {embedding.shape[0]} rows, "
                f"but tokenizer.ggml.tokens lists {config.vocab_size} tokens."
            )
        check_tensors(
            config, {name: (self._file, info.name, info.shape) for name, info in self._infos.items()}
        )
        require_complete(config, self._infos, self._file)
        check_vocabulary(metadata, self._file)
        return replace(config, tie_word_embeddings=self._is_tied())

    def _require_dequantizable(self) -> None:
        """Ask for each type of the file once, on a block of zeros, so that an unknown one is refused before
        loading."""
        first = {info.quantization: info.name for info in reversed(self._header.tensors.values())}
        for quantization, name in first.items():
            try:
                package_dequantize(
                    np.zeros((1, GGML_QUANT_SIZES[quantization][1]), dtype=np.uint8), quantization
                )
            except NotImplementedError:
                raise CheckpointError(
                    f"{self._file}: tensor {name!r} has type {quantization.name}, which cannot be "
                    "dequantised; use a file in one of the usual types (F32, F16, BF16, Q4_0 ... "
                    "Q8_0, K and IQ quants)."
                ) from None

    def _is_tied(self) -> bool:
        """Tied if there is no output.weight, or if it repeats the embedding byte for byte."""
        head, embedding = self._infos.get(HEAD), self._infos[EMBEDDING]
        if head is None:
            return True
        return head.quantization == embedding.quantization and np.array_equal(
            self._raw(head), self._raw(embedding)
        )

    @cached_property
    def fingerprint(self) -> str:
        return sampled_fingerprint([(self._header_bytes(), self._data)])

    @cached_property
    def tokenizer_file(self) -> Path:
        # The tokenizer depends on the header alone, so its bytes are the identity: the same file elsewhere
        # hits the same entry.
        key = hashlib.sha256(CONVERTER_VERSION.encode() + self._header_bytes()).hexdigest()[:24]
        return cached_tokenizer(
            key,
            lambda: build_tokenizer_json(self._header.metadata, self._file, progress=self._progress),
            self._cache_dir,
        )

    @property
    def tokens(self) -> list[str]:
        return self._header.metadata["tokenizer.ggml.tokens"]  # type: ignore[no-any-return]

    @property
    def stored_types(self) -> Mapping[str, str]:
        return {name: info.quantization.name for name, info in self._infos.items()}

    @cached_property
    def weight_format(self) -> str:
        file_type = self._header.metadata.get("general.file_type")
        known = {item.value: item.name for item in LlamaFileType}
        if isinstance(file_type, int) and file_type in known:
            return known[file_type].removeprefix("MOSTLY_").removeprefix("ALL_")
        sizes: Counter[str] = Counter()
        for info in self._infos.values():
            sizes[info.quantization.name] += info.num_bytes
        return sizes.most_common(1)[0][0]

    def tensors(self) -> "Iterator[tuple[str, torch.Tensor]]":
        with ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="dequantize") as threads:
            for spec in checkpoint_tensors(self.config):
                info = self._infos[spec.name]
                yield spec.name, self._load(info, spec.role == "norm", threads)

    def close(self) -> None:
        self._data = np.zeros(0, dtype=np.uint8)  # the mapping goes with its last reference

    def _load(self, info: TensorInfo, subtract_one: bool, threads: ThreadPoolExecutor) -> "torch.Tensor":
        columns = info.shape[-1]
        raw = self._raw(info).reshape(math.prod(info.shape[:-1]), -1)
        tensor, is_finite = dequantize_rows(raw, info.quantization, columns, threads)
        if not is_finite:
            raise CheckpointError(
                f"{self._file}: tensor {info.name!r} holds values that are not finite; the file is damaged."
            )
        tensor = tensor.view(info.shape)
        return tensor.sub_(1.0) if subtract_one else tensor

    def _raw(self, info: TensorInfo) -> Bytes:
        if info.start + info.num_bytes > len(self._data):
            raise CheckpointError(f"{self._file}: the checkpoint has been closed.")
        return self._data[info.start : info.start + info.num_bytes]

    def _header_bytes(self) -> bytes:
        return bytes(self._data[: self._header.header_bytes])


def _map(file: Path) -> Bytes:
    if not file.is_file():
        raise CheckpointError(f"{file}: is not a file.")
    if file.stat().st_size == 0:
        raise CheckpointError(f"{file}: is empty.")
    # np.asarray drops the memmap subclass, whose slices are slow, and keeps the mapping.
    return np.asarray(np.memmap(file, dtype=np.uint8, mode="r"))


def _join(files: Sequence[Path]) -> Bytes:
    sizes = [file.stat().st_size for file in files]
    if sum(sizes) and all(size % mmap.PAGESIZE == 0 for size in sizes[:-1]) and sys.platform == "linux":
        return _map_one_after_the_other(files, sizes)
    data = np.empty(sum(sizes), dtype=np.uint8)
    start = 0
    for file, size in zip(files, sizes, strict=True):
        with file.open("rb", buffering=0) as stream:
            while size and (count := stream.readinto(data.data[start : start + size])):
                start, size = start + count, size - count
        if size:
            raise CheckpointError(f"{file}: the file ends {size} bytes early.")
    return data


def _map_one_after_the_other(files: Sequence[Path], sizes: Sequence[int]) -> Bytes:
    """The parts as one range of memory that is read when it is needed. Each but the last is a whole number of
    pages."""
    # keeps the addresses, and gives all of them back when the last reference goes
    whole = mmap.mmap(-1, sum(sizes))
    data = np.frombuffer(whole, dtype=np.uint8)
    map_at = ctypes.CDLL(None, use_errno=True).mmap
    map_at.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    map_at.restype = ctypes.c_void_p
    address = data.ctypes.data
    for file, size in zip(files, sizes, strict=True):
        with file.open("rb") as stream:
            if (
                size
                and map_at(address, size, mmap.PROT_READ, mmap.MAP_PRIVATE | _MAP_FIXED, stream.fileno(), 0)
                != address
            ):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        address += size
    data.flags.writeable = False
    return data
