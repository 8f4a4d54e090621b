"""The operations that must be fast, behind one small interface with several backends.

``Ops`` is that interface; ``model/ops/reference.py`` is its specification in plain torch and the base class
of every other backend, which overrides what it does better and inherits the rest. The network calls nothing
else on its hot path. A backend is chosen once, when a model is loaded, by ``select_ops``.

Conventions: n = tokens in the flat batch, r = rows that need logits, h = hidden size, D = head_dim, Hq and
Hkv = query and KV heads, B = block_size, V = vocabulary. "compute dtype" is float32 or bfloat16. Every tensor
is contiguous unless said otherwise. Everything runs under torch.inference_mode().
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from model.config.tensors import LinearRole


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's share."""

    keys: torch.Tensor  # [num_blocks, block_size, kv_heads, head_dim]
    values: torch.Tensor  # the same


class LinearWeight(Protocol):
    """A weight matrix as a backend wants to keep it (repacked, quantised, or as it came). Opaque to the
    network."""

    @property
    def nbytes(self) -> int:
        """Bytes that this weight holds beyond what its other owner, if it is shared, holds anyway."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PackedForm:
    """A weight as its backend keeps it, taken apart so that it can be stored and put together again without
    packing."""

    values: Mapping[str, int | str]
    tensors: Mapping[str, torch.Tensor]


@dataclass(slots=True, eq=False, weakref_slot=True)
class AttentionMetadata:
    """How one step's flat batch maps onto the cache of one layer group (global or local). Shared by all
    layers of the group.

    Sequences lie one after the other in the flat batch. Sequence i owns tokens ``query_start[i] :
    query_start[i + 1]``, the last ``query_lens[i]`` of its ``context_lens[i]`` tokens: its query j stands at
    position ``context_lens[i] - query_lens[i] + j``. Query at position t sees keys at positions s with ``s <=
    t``, and ``t - window < s`` where there is a window.
    """

    window: int | None  # None: full causal attention
    block_size: int
    query_lens: tuple[int, ...]  # host copies, for backends that plan on the host
    # Tokens in the cache once this step has written its own; upper bounds in a step that is captured
    # (execution/cuda_graphs.py).
    context_lens: tuple[int, ...]
    query_start: torch.Tensor  # int32 [num_seqs + 1]
    # int32 [num_seqs]; 0 for a row that pads a captured step: it reads nothing
    context_lens_tensor: torch.Tensor
    # int32 [num_seqs, max_blocks], indexed by position // B; rows may be parts of longer ones. Entry 0 is the
    # null block: recycled or padding, never to be read.
    block_table: torch.Tensor
    # int64 [n]: block id * B + position % B, where each token's key and value are written.
    slot_mapping: torch.Tensor


@dataclass(slots=True, eq=False)
class LayerOperands:
    """All that one decoder block multiplies and scales by. Scales are float32, Gemma's (1 + weight)."""

    qkv: LinearWeight
    attention_output: LinearWeight
    gate_up: LinearWeight
    down: LinearWeight
    q_norm: torch.Tensor  # [D], as k_norm
    k_norm: torch.Tensor
    post_attention_norm: torch.Tensor  # [h], as the following
    pre_feedforward_norm: torch.Tensor
    post_feedforward_norm: torch.Tensor
    next_norm: torch.Tensor  # of the next block's input, or the final one
    is_global: bool
    num_heads: int
    intermediate_size: int
    query_scale: float
    eps: float


class Candidates(NamedTuple):
    """The likeliest tokens of each row, likeliest first; equal values in ascending order of id."""

    values: torch.Tensor  # float32 [r, k]: the logits as they stand, not divided by the temperature
    token_ids: torch.Tensor  # int64 [r, k]
    # float32 [r]: log of the sum of exp((logits - values[:, 0]) / temperature) over the whole row, so that
    # the log-probability of a logit x is (x - values[:, 0]) / temperature - log_total, accurate at every
    # temperature.
    log_total: torch.Tensor


class Ops(ABC):
    """One backend for one device and compute dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    @property
    @abstractmethod
    def name(self) -> str:
        """Short name for logs."""

    @property
    def quantization(self) -> str:
        """How linear weights are kept: "none", "int8", "int4" or "fp8"."""
        return "none"

    @property
    def cache_dtype(self) -> torch.dtype:
        """Type of the keys and values that attention reads: the compute dtype, or bfloat16 where weights are
        rounded, too."""
        return self.dtype

    def empty_cache(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Room for keys or values of ``cache_dtype``, not written yet. Raises RuntimeError where the device
        has none."""
        return torch.empty(shape, dtype=self.cache_dtype, device=self.device)

    # -- linear layers ---------------------------------------------------------------------------------------

    @abstractmethod
    def pack_linear(self, weight: torch.Tensor, role: LinearRole, *, shared: bool = False) -> LinearWeight:
        """Take over a weight [out_features, in_features] in the compute dtype, once, at load.

        A backend may repack or quantise it and let go of the original, or keep it. ``shared``: the tensor
        also belongs to someone else (a tied head is a view of the first rows of the embedding matrix, which
        the network keeps for look-ups).
        """

    @property
    def stores_packed_weights(self) -> bool:
        """Whether packed weights are worth being kept on disk; only then are there the two that follow."""
        return False

    def to_packed_form(self, weight: LinearWeight) -> PackedForm:
        """A weight of ``pack_linear`` taken apart; its tensors share the weight's memory."""
        raise NotImplementedError(f"{self.name} stores no packed weights")

    def from_packed_form(self, form: PackedForm) -> LinearWeight:
        """The weight of a form that a backend made like this one gave, keeping the form's tensors."""
        raise NotImplementedError(f"{self.name} stores no packed weights")

    @abstractmethod
    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """x [n, in_features] times weight transposed -> [n, out_features], in x's dtype, accumulated in
        float32."""

    @abstractmethod
    def logits(self, x: torch.Tensor, head: LinearWeight) -> torch.Tensor:
        """Final hidden states [r, h] -> logits float32 [r, V] (writable by the caller), never rounded to
        bfloat16. r may be 0."""

    def greedy(self, x: torch.Tensor, head: LinearWeight) -> torch.Tensor | None:
        """The likeliest token of each final hidden state [r, h], the lowest id among equals, -1 where not
        finite: int64 [r]. As ``argmax`` of ``logits``, for less than those cost; None: the backend has no
        such way for this head."""
        return None

    # -- elementwise -----------------------------------------------------------------------------------------

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last axis: x * rsqrt(mean(x^2) + eps) * scale, in float32, cast to x's dtype after
        the multiply.

        x [n, h] in the compute dtype; ``scale`` float32 [h] is Gemma's (1 + weight).
        """

    @abstractmethod
    def norm_add_norm(
        self,
        branch: torch.Tensor,
        residual: torch.Tensor,
        post_scale: torch.Tensor,
        next_scale: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """Between two sub-layers: residual += rms_norm(branch, post_scale) in place, then returns
        rms_norm(residual, next_scale).

        ``branch`` [n, h] is the output of attention or MLP, ``residual`` [n, h] the stream, both in the
        compute dtype; scales float32 [h]. The normed branch and the new residual are rounded to the compute
        dtype.
        """

    @abstractmethod
    def geglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [n, 2 * I], gate first -> gelu(gate, tanh approximation) * up, [n, I]."""

    # -- attention -------------------------------------------------------------------------------------------

    @abstractmethod
    def qk_norm_rope_cache_write(
        self,
        qkv: torch.Tensor,
        q_scale: torch.Tensor,
        k_scale: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """Normalise and rotate queries and keys, write keys and values to the cache, return the queries [n,
        Hq, D].

        qkv [n, (Hq + 2 Hkv) * D] in the compute dtype: queries, keys, values. q_scale, k_scale float32 [D] (1
        + weight). cos, sin float32 [n, D / 2] of each token's angles: for x = [x1, x2] split in halves
        (rotate-half), [x1 cos - x2 sin, x2 cos + x1 sin]. Norm and rotation run in float32 and are rounded
        once. Values are written as they are. k_cache, v_cache [num_blocks, B, Hkv, D] in the compute dtype or
        ``cache_dtype``, each possibly a strided view whose last two axes are contiguous. slot_mapping int64
        [n].
        """

    @abstractmethod
    def paged_attention(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """Causal (or windowed) attention of the flat batch over its paged context -> [n, Hq * D] in query's
        dtype.

        query [n, Hq, D]; caches as above, already holding this step's keys and values; query head i reads KV
        head i // (Hq / Hkv). Scores (query . key * scale), softmax and the weighted sum run in float32.
        Prefill chunks and decodes are mixed freely. Memory outside the visible keys may hold anything, NaN
        included, and must not influence the result; blocks wholly outside the window may be gone (block table
        entry 0) and must not be read.
        """

    def decoder_layers(
        self,
        layers: Sequence[LayerOperands],
        hidden: torch.Tensor,
        residual: torch.Tensor,
        rotary: Mapping[bool, tuple[torch.Tensor, torch.Tensor]],
        caches: Sequence[LayerCache],
        metadata: Mapping[bool, AttentionMetadata],
    ) -> bool:
        """All blocks in one call, where a backend can: the same as the single operations, bit for bit.

        ``hidden`` [n, h], the normed stream, and ``residual`` [n, h] are updated in place; ``caches`` has an
        entry for each of the ``layers``, and neither changes between calls with the same objects. ``rotary``,
        which is (cos, sin), and ``metadata`` are those of global layers and of others. False: the backend has
        no such form for this batch, and nothing was done.
        """
        return False

    # -- sampling --------------------------------------------------------------------------------------------

    @abstractmethod
    def all_finite(self, logits: torch.Tensor) -> torch.Tensor:
        """Whether each row holds no NaN and no infinity: float32 [r, V] -> bool [r]."""

    @abstractmethod
    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The likeliest token of each row, the lowest id among equals: float32 [r, V] -> int64 [r]."""

    def mask_rows(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        """Set to -inf what the masks forbid, in place: logits float32 [r, V], rows int64 [m] without repeats,
        masks uint8 [m, ceil(V / 8)], a bit for each token, the lowest bit of a byte first. All on the same
        device."""
        bits = masks[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=masks.device)
        forbidden = (bits & 1).view(len(rows), -1)[:, : logits.shape[1]] == 0
        logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)

    @abstractmethod
    def top_candidates(self, logits: torch.Tensor, k: int, temperature: torch.Tensor) -> Candidates:
        """The k likeliest tokens of each row and the row's whole mass, without sorting the vocabulary.

        logits float32 [r, V], 1 <= k <= V, temperature float32 [r] > 0. Deterministic: ties go to the lowest
        id, also at the border of the k. -inf marks a masked token; every row has a finite one. Rows do not
        influence each other.
        """

    @abstractmethod
    def draw(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        """Draw a token per row from softmax(logits / temperature), cut at top_p and min_p, by inverse CDF in
        order of token id.

        logits float32 [r, V]; temperature, min_p float32 [r]; top_p float64 [r], uniform float64 [r] in [0,
        1) -> int64 [r]. top_p keeps the likeliest tokens, equals in ascending order of id, up to the one with
        which their mass reaches top_p, and at least one; 1 keeps all. Tokens less likely than min_p times the
        likeliest are left out. A token of probability zero is never drawn. Rows do not influence each other.
        """
