"""The records that the C++ kernels take (model/ops/cpu/cpp), field by field as they stand there. Every field
has 64 bits, so nothing lies between them; ``check_sizes`` compares what the library says of its own. Imports
no torch."""

import ctypes
from collections.abc import Sequence
from typing import Any

_ADDRESS, _INTEGER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


def _fields(*groups: tuple[Any, str]) -> Sequence[tuple[str, Any]]:
    """Build the fields of a structure from pairs of a type and the names of its fields."""
    return [(name, kind) for kind, names in groups for name in names.split()]


_STRIDES = "k_block_stride k_slot_stride v_block_stride v_slot_stride"  # strides of the caches, in elements


class AttentionArguments(ctypes.Structure):
    """Mirrors AttentionArguments in cpp/attention.h: the arguments of one call of paged_attention."""

    _fields_ = _fields(
        (_ADDRESS, "query k_cache v_cache output block_table query_start context_lens"),
        (_INTEGER, "num_seqs table_stride block_size num_heads kv_heads head_dim"),
        (_INTEGER, _STRIDES),
        (_INTEGER, "window is_bf16 cache_is_bf16 threads"),
        (_REAL, "scale"),
    )


class RopeArguments(ctypes.Structure):
    """Mirrors RopeArguments in cpp/kernels.h: the arguments of one call of qk_norm_rope_cache_write."""

    _fields_ = _fields(
        (_ADDRESS, "qkv q_scale k_scale cos sin query k_cache v_cache slots"),
        (_INTEGER, "n num_heads kv_heads head_dim block_size"),
        (_INTEGER, _STRIDES),
        (_INTEGER, "is_bf16 cache_is_bf16 threads"),
        (_REAL, "eps"),
    )


class LayerArguments(ctypes.Structure):
    """Mirrors LayerArguments in cpp/layer.cpp: one decoder block, the same from step to step."""

    _fields_ = _fields(
        (_ADDRESS, "qkv attention_output gate_up down"),
        (_ADDRESS, "q_scale k_scale post_attention pre_feedforward post_feedforward next"),
        (_ADDRESS, "k_cache v_cache"),
        (_INTEGER, _STRIDES),
        (_INTEGER, "hidden_size intermediate_size num_heads kv_heads head_dim"),
        (_INTEGER, "is_global is_bf16 cache_is_bf16"),
        (_REAL, "eps scale"),
    )


class StepArguments(ctypes.Structure):
    """Mirrors StepArguments in cpp/layer.cpp: one step's batch, for the layers of one group."""

    _fields_ = _fields(
        (_ADDRESS, "hidden residual first second cos sin slots block_table query_start context_lens"),
        (_INTEGER, "n num_seqs table_stride block_size window threads"),
    )


class PackedWeightRecord(ctypes.Structure):
    """Mirrors PackedWeight in cpp/linear.h: a weight in the kernels' layout."""

    _fields_ = (
        *_fields((_ADDRESS, "data scales"), (_INTEGER, "n k group")),
        ("kind", ctypes.c_int32),
    )


RECORDS = (AttentionArguments, RopeArguments, LayerArguments, StepArguments, PackedWeightRecord)


def check_sizes(library: ctypes.CDLL) -> None:
    """Compare the sizes of all records with those of the library. Raises RuntimeError where one differs."""
    library.record_size.argtypes = (ctypes.c_int32,)
    library.record_size.restype = ctypes.c_int64
    for index, record in enumerate(RECORDS):
        size = library.record_size(index)
        if size != ctypes.sizeof(record):
            raise RuntimeError(
                f"{record.__name__} has {ctypes.sizeof(record)} bytes in model/ops/cpu/records.py, "
                f"but {size} in the compiled kernels; bring the two in line."
            )
