"""What every checkpoint format gives to the model: configuration, tokenizer file and a stream of named
tensors; and the checks that are the same for all formats. Names and values are canonical: Hugging Face's
names, norm weights without the 1 added. Importing this module imports no torch.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from model.config.gemma3_config import Gemma3Config
from model.interface.errors import CheckpointError
from model.precision import EMBEDDING, HEAD

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
        """Stream every tensor of ``expected_shapes(config)`` once, each with that shape. GGUF weights come
        dequantised in float32, safetensors weights in their stored dtype; ``lm_head.weight`` only if the
        embeddings are not tied."""
        ...

    def close(self) -> None:
        """Give the files back. Tensors already yielded stay valid."""
        ...


def expected_shapes(config: Gemma3Config) -> dict[str, tuple[int, ...]]:
    """Every canonical tensor of the model with its shape; a linear weight is [output features, input
    features]."""
    hidden, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "post_attention_layernorm": (hidden,),
        "pre_feedforward_layernorm": (hidden,),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
        "post_feedforward_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def is_norm(name: str) -> bool:
    """Whether a canonical name is that of an RMSNorm weight (all of them end in ``norm.weight``)."""
    return name.endswith("norm.weight")


def check_tensors(config: Gemma3Config, found: Mapping[str, tuple[str, str, tuple[int, ...]]]) -> None:
    """Refuse unknown, missing and misshapen tensors. ``found``: canonical name -> (file, name in the file,
    shape)."""
    expected = expected_shapes(config)
    for name, (file, stored_name, shape) in found.items():
        if name not in expected and name != HEAD:
            raise CheckpointError(
                f"{file}: tensor {stored_name!r:.200} is not part of a Gemma 3 text model of "
                "this configuration."
            )
        wanted = expected.get(name, expected[EMBEDDING])
        if shape != wanted:
            raise CheckpointError(
                f"{file}: tensor {stored_name!r} has shape {list(shape)}, but the configuration asks "
                f"for {list(wanted)}."
            )


def require_complete(config: Gemma3Config, found: Mapping[str, Any], where: str) -> None:
    """Refuse a checkpoint in which a tensor of the model is missing."""
    missing = [name for name in expected_shapes(config) if name not in found]
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
