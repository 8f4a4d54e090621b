"""What every checkpoint format gives to the model: configuration, tokenizer file and a stream of named
tensors; and the checks that are the same for all formats. Names and values are canonical: Hugging Face's
names, norm weights without the 1 added. Importing this module imports no torch.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from model.config.gemma3_config import Gemma3Config
from model.config.tensors import HEAD, checkpoint_tensors, model_tensors
from model.interface.errors import CheckpointError

if TYPE_CHECKING:
    import torch

END_OF_TURN = "<end_of_turn>"


class Checkpoint(Protocol):
    """An opened checkpoint whose names, shapes and completeness have been checked; no weights are read before
    ``tensors()``."""

    @property
    def config(self) -> Gemma3Config: ...

    @property
    def name(self) -> str:
        """Default name under which the model is served."""
        ...

    @property
    def fingerprint(self) -> str:
        """Short hexadecimal identity of the files, independent of where they lie."""
        ...

    @property
    def weight_files(self) -> Sequence[Path]:
        """The files that the weights are in."""
        ...

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Sampling defaults of generation_config.json (temperature, top_k, top_p, min_p, repetition_penalty);
        may be empty."""
        ...

    @property
    def tokenizer_file(self) -> Path:
        """A tokenizer.json. For GGUF it is rebuilt and cached on first use (a few seconds)."""
        ...

    @property
    def tokens(self) -> Sequence[str] | None:
        """The text of every token by id, with blanks or the tokenizer's mark in their place; None where it is
        not at hand."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The checkpoint's own Jinja template."""
        ...

    @property
    def weight_format(self) -> str:
        """How the weights are stored, for logs: "Q4_K_M", "bfloat16"."""
        ...

    @property
    def stored_types(self) -> Mapping[str, str]:
        """The type of each tensor as the file names it ("Q4_K", "BF16"), by canonical name."""
        ...

    def tensors(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """Stream every tensor of ``checkpoint_tensors(config)`` once, each with its shape. GGUF weights come
        dequantised in float32, safetensors weights in their stored dtype; ``lm_head.weight`` only if the
        embeddings are not tied."""
        ...

    def close(self) -> None:
        """Give the files back. Tensors already yielded stay valid."""
        ...


def check_tensors(config: Gemma3Config, found: Mapping[str, tuple[str, str, tuple[int, ...]]]) -> None:
    """Refuse unknown, missing and misshapen tensors. ``found``: canonical name -> (file, name in the file,
    shape)."""
    tensors = model_tensors(config)
    for name, (file, stored_name, shape) in found.items():
        if name not in tensors:
            raise CheckpointError(
                f"{file}: tensor {stored_name!r:.200} is not part of a Gemma 3 text model of "
                "this configuration."
            )
        wanted = tensors[name].shape
        if shape != wanted:
            raise CheckpointError(
                f"{file}: tensor {stored_name!r} has shape {list(shape)}, but the configuration asks "
                f"for {list(wanted)}."
            )


def require_complete(config: Gemma3Config, found: Mapping[str, Any], where: str) -> None:
    """Refuse a checkpoint in which a tensor of the model is missing."""
    missing = [spec.name for spec in checkpoint_tensors(config) if spec.name not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        hint = (
            " (tie_word_embeddings is false, so a separate output head is needed)"
            if missing[0] == HEAD
            else ""
        )
        raise CheckpointError(f"{where}: tensor {missing[0]!r} is missing{more}{hint}.")


def sampled_fingerprint(parts: list[tuple[bytes, Any]], samples: int = 64, sample_bytes: int = 4096) -> str:
    """Identity of files from (header bytes, buffer of the whole file): header, size and samples spread evenly
    over the rest."""
    digest = hashlib.sha256()
    for header, buffer in parts:
        size = len(buffer)
        digest.update(f"{size}:{len(header)}:".encode())
        digest.update(header)
        for index in range(samples):
            start = max(0, size - sample_bytes) * index // (samples - 1)
            digest.update(bytes(buffer[start : start + sample_bytes]))
    return digest.hexdigest()[:16]
