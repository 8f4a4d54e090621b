"""In which types and bits a model is kept and computed, and how many bytes that takes: asked by ``gemserve
info``, by the loader and by the backends, so that all three say the same. Imports no torch.

``device`` is "cpu" or "cuda". Types are named as torch names them. "Kernels" are the compiled ones of a CPU.
"""

import math
from collections.abc import Iterable, Mapping

from model.config.gemma3_config import Gemma3Config
from model.config.tensors import EMBEDDING, HEAD, LinearSpec, layer_linears, model_tensors
from model.host.cpu_features import cpu_computes_bfloat16
from model.interface.errors import ConfigError

TYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
GROUP = 32  # inputs that share a scale, as in GGUF's Q8_0, Q5_0 and Q4_K
FEW_BITS_SHARE = 0.75  # of a weight's panels must fit 5 bits for it to be kept in few bits, else it is int8
# GGUF types whose values 4 or 5 bits hold exactly: bytes of a group with its float16 scale, and its middle.
_FEW_BITS_GROUP_BYTES: Mapping[str, int] = {
    "Q4_0": 16 + 2,
    "Q4_1": 16 + 4,
    "Q4_K": 16 + 4,
    "Q5_0": 20 + 2,
    "Q5_1": 20 + 4,
    "Q5_K": 20 + 4,
}
_INT8_GROUP_BYTES, _FOUR_BITS_GROUP_BYTES = GROUP + 2, 16 + 4


def compute_type(dtype: str, device: str) -> str:
    """The type of activations for a --dtype value. "auto" is bfloat16 where the device computes in it, else
    float32. float16 is refused: Gemma 3's residual stream passes its largest number, 65504."""
    if dtype == "auto":
        return "bfloat16" if device != "cpu" or cpu_computes_bfloat16() else "float32"
    if dtype in ("float16", "half"):
        raise ConfigError(
            "--dtype float16 is not supported: Gemma 3 overflows in it. Use bfloat16, float32 or auto."
        )
    if dtype not in TYPE_BYTES:
        raise ConfigError(f"--dtype {dtype} is not supported. Use bfloat16, float32 or auto.")
    return dtype


def resolve_quantization(quantization: str, dtype: str) -> str:
    """What a --quantization value means: "auto" is "none" where a --dtype asks for the weights as they
    are."""
    if quantization not in ("auto", "none", "int8", "int4", "fp8"):
        raise ConfigError(
            f"--quantization {quantization} is not supported. Use int8, int4, fp8, none or auto."
        )
    return "none" if quantization == "auto" and dtype != "auto" else quantization


def kept_quantization(quantization: str, device: str, *, has_kernels: bool) -> str:
    """What linear weights are rounded to, "none", "int8", "int4" or "fp8", for what ``resolve_quantization``
    gave: "auto" is int8 where a CPU has kernels for it, and elsewhere none."""
    if quantization == "auto":
        return "int8" if device == "cpu" and has_kernels else "none"
    return quantization


def cache_type(compute: str, quantization: str, device: str) -> str:
    """The type of keys and values: that of the activations; bfloat16 on a CPU that rounds weights, too."""
    return "bfloat16" if device == "cpu" and quantization in ("int8", "int4") else compute


def weight_bytes(
    config: Gemma3Config,
    *,
    compute: str,
    quantization: str,
    device: str,
    has_kernels: bool,
    vocabulary_rows: int,
    stored_types: Mapping[str, str],
) -> int:
    """Bytes of all weights once they are loaded, without loading them.

    ``quantization``: what ``kept_quantization`` gave. ``vocabulary_rows``: those of the embedding and of the
    head that this device holds. ``stored_types``: the type of each tensor in the checkpoint, by which weights
    of 4 and 5 bits, and those that bfloat16 holds, are known; empty where there is no checkpoint. Left out
    are what the kernels add to a weight to find their way in it, and rows that fill its last panel: below 1 %
    of any published size.
    """
    packs = device == "cpu" and has_kernels
    in_full = TYPE_BYTES[compute]

    def of_linear(weight: LinearSpec) -> float:
        count = weight.out_features * weight.in_features
        if quantization in ("int8", "fp8") and device == "cuda":
            return count + 4 * weight.out_features  # a float32 scale for each row
        if quantization == "none" or weight.in_features % GROUP:
            return count * _exact_bytes(
                [piece.name for piece in weight.pieces], compute, stored_types, packs=packs
            )
        if quantization == "int4":
            return count * _FOUR_BITS_GROUP_BYTES / GROUP
        return _int8_bytes(weight, stored_types)

    hidden = config.hidden_size
    total: float = vocabulary_rows * hidden * in_full  # the embedding
    for layer in range(config.num_hidden_layers):
        total += sum(of_linear(weight) for weight in layer_linears(config, layer).values())
    norms = (spec for spec in model_tensors(config).values() if spec.role == "norm")
    total += sum(TYPE_BYTES["float32"] * math.prod(spec.shape) for spec in norms)
    # a head of its own, even where it is tied to the embedding; of a rounded one a sketch in 4 bits
    if packs:
        rounded = quantization != "none" and hidden % GROUP == 0
        name = EMBEDDING if config.tie_word_embeddings else HEAD
        exact = _exact_bytes((name,), compute, stored_types, packs=packs)
        each = (_INT8_GROUP_BYTES + _FOUR_BITS_GROUP_BYTES) / GROUP if rounded else exact
        total += vocabulary_rows * hidden * each
    elif not config.tie_word_embeddings:
        total += vocabulary_rows * hidden * in_full
    return round(total)


def _exact_bytes(names: Iterable[str], compute: str, stored_types: Mapping[str, str], *, packs: bool) -> int:
    """Bytes of a weight that is kept as it is: kernels keep in bfloat16 what loses nothing by it."""
    fits = packs and all(stored_types.get(name) == "BF16" for name in names)
    return TYPE_BYTES["bfloat16" if fits else compute]


def _int8_bytes(weight: LinearSpec, stored_types: Mapping[str, str]) -> float:
    """Of a CPU's int8 weight: in 4 or 5 bits what these hold exactly, where that is most of it."""
    rows = {piece.name: piece.shape[0] for piece in weight.pieces}
    group_bytes = {name: _FEW_BITS_GROUP_BYTES.get(stored_types.get(name, "")) for name in rows}
    few = sum(rows[name] for name in rows if group_bytes[name] is not None)
    if few < FEW_BITS_SHARE * weight.out_features:
        group_bytes = dict.fromkeys(group_bytes)
    groups = weight.in_features / GROUP
    return sum(rows[name] * groups * (group_bytes[name] or _INT8_GROUP_BYTES) for name in rows)
