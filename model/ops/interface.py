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
    """The keys and values of one layer in the paged cache."""

    keys: torch.Tensor  # [num_blocks, block_size, kv_heads, head_dim]
    values: torch.Tensor  # as keys


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
    """Describe how one step's flat batch maps onto the cache of one layer group (global or local). All layers
    of the group share it.

    Sequences lie one after the other in the flat batch. Sequence i owns tokens ``query_start[i] :
    query_start[i + 1]``, the last ``query_lens[i]`` of its ``context_lens[i]`` tokens: its query j stands at
    position ``context_lens[i] - query_lens[i] + j``. Query at position t sees keys at positions s with ``s <=
    t``, and ``t - window < s`` where there is a window.
    """

    window: int | None  # None: full causal attention
    block_size: int
    query_lens: tuple[int, ...]  # [num_seqs] on the host, for backends that plan there
    # [num_seqs] on the host: tokens of each sequence in the cache at the end of this step; upper bounds in a
    # captured step (execution/cuda_graphs.py)
    context_lens: tuple[int, ...]
    query_start: torch.Tensor  # int32 [num_seqs + 1]
    # int32 [num_seqs]; 0 for a row that pads a captured step, which reads no key
    context_lens_tensor: torch.Tensor
    # int32 [num_seqs, max_blocks], indexed by position // B; rows may be parts of longer ones. Entry 0 is the
    # null block: recycled or padding, never to be read.
    block_table: torch.Tensor
    # int64 [n]: block id * B + position % B, where each token's key and value are written.
    slot_mapping: torch.Tensor


@dataclass(slots=True, eq=False)
class LayerOperands:
    """Everything that one decoder block multiplies and scales by. Scales are float32 and Gemma's (1 +
    weight)."""

    qkv: LinearWeight
    attention_output: LinearWeight
    gate_up: LinearWeight
    down: LinearWeight
    q_norm: torch.Tensor  # float32 [D]
    k_norm: torch.Tensor  # float32 [D]
    post_attention_norm: torch.Tensor  # float32 [h], like the next three
    pre_feedforward_norm: torch.Tensor
    post_feedforward_norm: torch.Tensor
    next_norm: torch.Tensor  # the norm of the next block's input, or the network's final norm
    is_global: bool
    num_heads: int
    intermediate_size: int
    query_scale: float  # factor of the scores: query_pre_attn_scalar ** -0.5
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
        """The backend's short name for logs."""

    @property
    def quantization(self) -> str:
        """How linear weights are kept: "none", "int8", "int4" or "fp8"."""
        return "none"

    @property
    def cache_dtype(self) -> torch.dtype:
        """The type of keys and values in the cache: the compute dtype, or bfloat16 in backends that round
        weights as well."""
        return self.dtype

    def empty_cache(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Allocate uninitialised memory for keys or values in ``cache_dtype``. Raises RuntimeError where the
        device has too little."""
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
        """Whether packed weights are worth keeping on disk. ``to_packed_form`` and ``from_packed_form`` work
        only then."""
        return False

    def to_packed_form(self, weight: LinearWeight) -> PackedForm:
        """Take a weight of ``pack_linear`` apart; the tensors of the form share the weight's memory."""
        raise NotImplementedError(f"{self.name} stores no packed weights")

    def from_packed_form(self, form: PackedForm) -> LinearWeight:
        """Rebuild a weight from the form that an equal backend made; the weight keeps the form's tensors."""
        raise NotImplementedError(f"{self.name} stores no packed weights")

    @abstractmethod
    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """Multiply x [n, in_features] in the compute dtype by the transposed weight -> [n, out_features] in
        x's dtype, accumulated in float32. A backend that quantises may round the inputs as well as the
        weight."""

    @abstractmethod
    def logits(self, x: torch.Tensor, head: LinearWeight) -> torch.Tensor:
        """Multiply final hidden states [r, h] in the compute dtype by the head -> logits float32 [r, V],
        never rounded to bfloat16, which the caller may overwrite. r may be 0."""

    def greedy(self, x: torch.Tensor, head: LinearWeight) -> torch.Tensor | None:
        """Find the likeliest token of each final hidden state [r, h] without all logits -> int64 [r], -1
        where a value is not finite. The tokens are those of ``argmax(logits(x, head))``; where a backend
        finds them with a bound on the logits, its source says how sure that is. None: the backend has no such
        way for this head."""
        return None

    # -- elementwise -----------------------------------------------------------------------------------------

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        """Apply RMSNorm over the last axis (Zhang and Sennrich 2019): x * rsqrt(mean(x^2) + eps) * scale, in
        float32, cast to x's dtype after the multiply.

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
        """Close one sub-layer and open the next: residual += rms_norm(branch, post_scale) in place, then
        return rms_norm(residual, next_scale) [n, h].

        ``branch`` [n, h] is the output of attention or MLP, ``residual`` [n, h] the stream, both in the
        compute dtype; scales float32 [h]. The normed branch and the new residual are rounded to the compute
        dtype.
        """

    @abstractmethod
    def geglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Apply GeGLU (Shazeer 2020): gate_up [n, 2 * I] in the compute dtype, gate first -> gelu(gate) * up,
        [n, I] in the same dtype, with gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))."""

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
        """Normalise queries and keys of each head (RMSNorm), rotate them (RoPE, Su et al. 2021), write keys
        and values to the cache, and return the queries [n, Hq, D] in qkv's dtype.

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
        """Compute causal (or windowed) attention of the flat batch over its paged context -> [n, Hq * D] in
        query's dtype.

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
        """Run all blocks in one call, where a backend can, with the same bits as the single operations.

        ``hidden`` [n, h], the normed stream, and ``residual`` [n, h] are updated in place; ``caches`` has an
        entry for each of the ``layers``, and neither changes between calls with the same objects. ``rotary``,
        which is (cos, sin), and ``metadata`` are those of global layers and of others. False: the backend has
        no such form for this batch, and nothing was done.
        """
        return False

    # -- sampling --------------------------------------------------------------------------------------------

    @abstractmethod
    def all_finite(self, logits: torch.Tensor) -> torch.Tensor:
        """Tell for each row whether it holds no NaN and no infinity: float32 [r, V] -> bool [r]."""

    @abstractmethod
    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Find the likeliest token of each row, the lowest id among equals: float32 [r, V] -> int64 [r]."""

    def mask_rows(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        """Set to -inf what the masks forbid, in place: logits float32 [r, V], rows int64 [m] without repeats,
        masks uint8 [m, ceil(V / 8)], a bit for each token, the lowest bit of a byte first. All on the same
        device."""
        bits = masks[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=masks.device)
        forbidden = (bits & 1).view(len(rows), -1)[:, : logits.shape[1]] == 0
        logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)

    @abstractmethod
    def top_candidates(self, logits: torch.Tensor, k: int, temperature: torch.Tensor) -> Candidates:
        """Find the k likeliest tokens of each row and the row's total mass, without sorting the vocabulary.

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
