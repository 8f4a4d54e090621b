"""Every operation in plain torch: the specification that all backends are tested against, and the fallback
everywhere.

The contract of each method is written in ``model/ops/interface.py``; this file favours being obviously right,
and is only as fast as plain torch allows without obscuring that.
"""

from collections import defaultdict
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from model.config.tensors import LinearRole
from model.host.cpu_features import cpu_computes_bfloat16
from model.interface.kv_cache_spec import first_visible_key
from model.ops.interface import AttentionMetadata, Candidates, LinearWeight, Ops

# attention scores held at once (32 MiB of float32): queries of a long prefill are sliced to stay below
MAX_SCORES = 1 << 23
# elements of a bfloat16 weight widened to float32 at once: 1 MiB, which stays in cache
WEIGHT_SLICE_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A weight kept as it came."""

    tensor: torch.Tensor  # [out_features, in_features]
    nbytes: int


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """A batch of decoding sequences with similar context lengths: the cache slots to gather and the padding
    among them."""

    tokens: torch.Tensor  # int64 [s]: rows of the flat batch
    # int64 [s, t]: cache slots; places past a sequence's keys repeat its last, so nothing unwritten is read
    slots: torch.Tensor
    padding: torch.Tensor | None  # bool [s, 1, 1, t]: True where a place is padding; None when there is none


@dataclass(frozen=True, slots=True)
class PrefillSequence:
    """One sequence with several queries, and the slots of its visible keys."""

    first_token: int  # row of its first query in the flat batch
    num_queries: int
    first_query: int  # position of the first query, counted from the first gathered key
    slots: torch.Tensor  # int64 [t]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    decodes: list[DecodePlan]
    prefills: list[PrefillSequence]


def plan_attention(metadata: AttentionMetadata) -> AttentionPlan:
    """Find the cache slots that each sequence reads, once per step and layer group: exactly those of the
    visible keys.

    The lengths come from the tensor, since the host's copies are only upper bounds in a captured step. A
    sequence of length 0 is padding and reads nothing.
    """
    device = metadata.block_table.device
    block_size = metadata.block_size
    prefills: list[PrefillSequence] = []
    # grouped by the bit length of the number of keys, so that padding at most doubles them
    decodes: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    token = 0
    for i, (num_queries, context) in enumerate(
        zip(metadata.query_lens, metadata.context_lens_tensor.tolist(), strict=True)
    ):
        if context == 0:
            token += num_queries
            continue
        start = context - num_queries
        first = first_visible_key(start, metadata.window)
        if num_queries == 1:
            decodes[(context - first).bit_length()].append((i, token, first, context))
        elif num_queries:
            positions = torch.arange(first, context, device=device)
            slots = (
                metadata.block_table[i, positions // block_size].long() * block_size + positions % block_size
            )
            prefills.append(PrefillSequence(token, num_queries, start - first, slots))
        token += num_queries
    groups = []
    for members in decodes.values():
        sequences, tokens, firsts, contexts = (
            torch.tensor(column, device=device) for column in zip(*members, strict=True)
        )
        num_keys = max(context - first for _, _, first, context in members)
        positions = firsts[:, None] + torch.arange(num_keys, device=device)  # [s, t]
        is_padding = positions >= contexts[:, None]
        positions = torch.minimum(positions, contexts[:, None] - 1)
        blocks = metadata.block_table[sequences[:, None], positions // block_size].long()
        padded = any(context - first < num_keys for _, _, first, context in members)
        slots = blocks * block_size + positions % block_size
        groups.append(DecodePlan(tokens, slots, is_padding[:, None, None] if padded else None))
    return AttentionPlan(groups, prefills)


class ReferenceOps(Ops):
    """Plain torch on any device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.widen_weights = device.type == "cpu" and dtype == torch.bfloat16 and not cpu_computes_bfloat16()
        # Made in the first layer of a group and reused in its other layers; freed with the step's metadata.
        self._plans: WeakKeyDictionary[AttentionMetadata, AttentionPlan] = WeakKeyDictionary()

    @property
    def name(self) -> str:
        return "reference"

    def pack_linear(self, weight: torch.Tensor, role: LinearRole, *, shared: bool = False) -> LinearWeight:
        return PlainWeight(weight, 0 if shared else weight.nbytes)

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        assert isinstance(weight, PlainWeight)
        if self.widen_weights:
            return self._linear_float32(x, weight.tensor).to(x.dtype)
        return F.linear(x, weight.tensor)

    def logits(self, x: torch.Tensor, head: LinearWeight) -> torch.Tensor:
        assert isinstance(head, PlainWeight)
        if x.dtype == torch.float32:
            return F.linear(x, head.tensor)
        return self._linear_float32(x, head.tensor)

    @staticmethod
    def _linear_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply bfloat16 x [n, in_features] by the transposed weight -> float32 [n, out_features]: exact
        products, float32 sums, the weight widened one slice at a time."""
        out_features, in_features = weight.shape
        rows = max(1, WEIGHT_SLICE_ELEMENTS // in_features)
        wide = x.float()
        result = torch.empty(x.shape[0], out_features, dtype=torch.float32, device=x.device)
        for first in range(0, out_features, rows):
            piece = weight[first : first + rows].float()
            result[:, first : first + rows] = F.linear(wide, piece)
        return result

    def rms_norm(self, x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        return _rms_norm_float32(x, scale, eps).to(x.dtype)

    def norm_add_norm(
        self,
        branch: torch.Tensor,
        residual: torch.Tensor,
        post_scale: torch.Tensor,
        next_scale: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        residual += self.rms_norm(branch, post_scale, eps)
        return self.rms_norm(residual, next_scale, eps)

    def geglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

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
        block_size, num_kv_heads, head_dim = k_cache.shape[1:]
        heads = qkv.view(qkv.shape[0], -1, head_dim)  # [n, Hq + 2 Hkv, D]
        num_heads = heads.shape[1] - 2 * num_kv_heads
        query, key, value = heads.tensor_split((num_heads, num_heads + num_kv_heads), dim=1)
        query = _rotate(_rms_norm_float32(query, q_scale, eps), cos, sin).to(qkv.dtype)
        key = _rotate(_rms_norm_float32(key, k_scale, eps), cos, sin).to(k_cache.dtype)
        block = slot_mapping // block_size
        offset = slot_mapping % block_size
        k_cache.index_put_((block, offset), key)
        v_cache.index_put_((block, offset), value.to(v_cache.dtype))
        return query

    def paged_attention(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        plan = self._plans.get(metadata)
        if plan is None:
            plan = self._plans[metadata] = plan_attention(metadata)
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = k_cache.shape[2]
        output = torch.zeros_like(query)
        for group in plan.decodes:
            # [s, Hkv, G, D]
            grouped = query[group.tokens].view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim).float()
            key = _gather(k_cache, group.slots).permute(0, 2, 3, 1)  # [s, Hkv, D, t]
            value = _gather(v_cache, group.slots).transpose(1, 2)  # [s, Hkv, t, D]
            scores = torch.matmul(grouped * scale, key)
            if group.padding is not None:
                scores.masked_fill_(group.padding, -torch.inf)
            result = torch.matmul(torch.softmax(scores, dim=-1), value)  # [s, Hkv, G, D]
            output[group.tokens] = result.view(-1, num_heads, head_dim).to(query.dtype)
        for sequence in plan.prefills:
            rows = slice(sequence.first_token, sequence.first_token + sequence.num_queries)
            key = _gather(k_cache, sequence.slots)  # [t, Hkv, D]
            value = _gather(v_cache, sequence.slots)
            output[rows] = _prefill_attention(
                query[rows], key, value, sequence.first_query, metadata.window, scale
            )
        return output.view(num_tokens, num_heads * head_dim)

    def all_finite(self, logits: torch.Tensor) -> torch.Tensor:
        # a NaN or an infinity stays one in the sum, and logits are far from overflow
        return torch.isfinite(logits.sum(dim=-1))

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1)

    def top_candidates(self, logits: torch.Tensor, k: int, temperature: torch.Tensor) -> Candidates:
        # One more than asked shows whether the k-th value is shared with a token outside, which torch.topk
        # chooses arbitrarily.
        values, token_ids = logits.topk(min(k + 1, logits.shape[1]), dim=-1)
        if values.shape[1] > k:
            for row in (values[:, k] == values[:, k - 1]).nonzero()[:, 0].tolist():
                border = values[row, k]
                above = (logits[row] > border).nonzero()[:, 0]
                equal = (logits[row] == border).nonzero()[: k - len(above), 0]
                token_ids[row, :k] = torch.cat((above, equal))
        token_ids = token_ids[:, :k].sort(dim=-1).values
        values, order = logits.gather(1, token_ids).sort(dim=-1, descending=True, stable=True)
        relative = (logits - values[:, :1]).div_(temperature[:, None])
        log_total = relative.exp_().sum(dim=-1).log()
        return Candidates(values, token_ids.gather(1, order), log_total)

    def draw(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        # likelihoods relative to the likeliest token's
        weights = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature[:, None]).exp_()
        cutting = (top_p < 1.0).nonzero()[:, 0]
        if len(cutting):
            likeliest_first, order = weights[cutting].sort(dim=-1, descending=True, stable=True)
            mass = likeliest_first.cumsum(dim=-1, dtype=torch.float64)
            removed = mass - likeliest_first >= top_p[cutting, None] * mass[:, -1:]
            removed[:, 0] = False
            weights[cutting] = weights[cutting].masked_fill(
                torch.zeros_like(removed).scatter(1, order, removed), 0.0
            )
        weights.masked_fill_(weights < min_p[:, None], 0.0)
        return inverse_cdf(weights, uniform)


def inverse_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Find the first entry of each row whose running sum exceeds uniform * total: weights [r, k] >= 0,
    uniform float64 [r] -> int64 [r]."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    # The total is a running sum's end, and uniform < 1: a product rounded up to the total would otherwise run
    # off the end.
    total = cumulative[:, -1:]
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _rms_norm_float32(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * scale


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)  # [n, heads, D / 2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Gather the rows of a cache [num_blocks, B, Hkv, D] at the given slots -> float32 [*slots.shape, Hkv,
    D]."""
    block_size = cache.shape[1]
    if cache.is_contiguous():
        flat = cache.view(-1, *cache.shape[2:])
        return flat.index_select(0, slots.flatten()).view(*slots.shape, *cache.shape[2:]).float()
    return cache[slots // block_size, slots % block_size].float()


def _prefill_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first_query: int,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """Compute attention of consecutive queries over a gathered context -> [q, Hq, D] in query's dtype.

    query [q, Hq, D]; key, value float32 [t, Hkv, D]; query j stands at place first_query + j of the context.
    Queries are taken in slices, each over just the keys that one of them can see, so that the scores held at
    once stay bounded.
    """
    num_queries, num_heads, head_dim = query.shape
    num_keys, num_kv_heads, _ = key.shape
    group = num_heads // num_kv_heads
    output = torch.empty_like(query)
    step = max(1, min(num_queries, MAX_SCORES // (num_heads * num_keys), window or num_queries))
    for first in range(0, num_queries, step):
        count = min(step, num_queries - first)
        place = first_query + first
        low = first_visible_key(place, window)
        high = place + count
        grouped = query[first : first + count].float().view(count, num_kv_heads, group, head_dim) * scale
        grouped = grouped.permute(1, 2, 0, 3).reshape(num_kv_heads, group * count, head_dim)
        scores = torch.matmul(grouped, key[low:high].permute(1, 2, 0)).view(
            num_kv_heads, group, count, high - low
        )
        distance = torch.arange(place, high, device=query.device)[:, None] - torch.arange(
            low, high, device=query.device
        )
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        weights = torch.softmax(scores.masked_fill_(hidden, -torch.inf), dim=-1).view(
            num_kv_heads, group * count, high - low
        )
        result = torch.matmul(weights, value[low:high].transpose(0, 1)).view(
            num_kv_heads, group, count, head_dim
        )
        output[first : first + count] = (
            result.permute(2, 0, 1, 3).reshape(count, num_heads, head_dim).to(query.dtype)
        )
    return output
