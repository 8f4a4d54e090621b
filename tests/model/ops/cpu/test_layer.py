"""Decoder blocks run as a whole are the single operations, bit for bit: hidden state, residual stream and
cache."""

from collections.abc import Sequence

import pytest
import torch

from model.ops.cpu.weights import WeightStorage
from model.ops.interface import AttentionMetadata, LayerCache, LayerOperands, Ops
from tests.model.ops.cpu.harness import DTYPES, attention_case, cpu_ops, every_instruction_set, reference_ops

pytestmark = every_instruction_set

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, EPS, QUERY_SCALE = 96, 160, 4, 2, 32, 1e-6, 0.2
BATCHES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((1,), (1,)),
    ((1, 1, 1), (15, 160, 17)),
    ((1, 5, 1, 40), (300, 5, 1, 300)),
    ((70,), (70,)),
]
State = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # hidden, residual, keys, values
Rotary = tuple[torch.Tensor, torch.Tensor]


def operands(ops: Ops, dtype: torch.dtype, *, is_global: bool = False, seed: int = 2) -> LayerOperands:
    generator = torch.Generator().manual_seed(seed)

    def weight(n: int, k: int) -> torch.Tensor:
        scale: float = k**-0.5
        return (torch.randn(n, k, generator=generator) * scale).to(dtype)

    def scale(size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator) + 0.5

    return LayerOperands(
        qkv=ops.pack_linear(weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), "qkv"),
        attention_output=ops.pack_linear(weight(HIDDEN, HEADS * HEAD_DIM), "attention_output"),
        gate_up=ops.pack_linear(weight(2 * INTERMEDIATE, HIDDEN), "gate_up"),
        down=ops.pack_linear(weight(HIDDEN, INTERMEDIATE), "down"),
        q_norm=scale(HEAD_DIM),
        k_norm=scale(HEAD_DIM),
        post_attention_norm=scale(HIDDEN),
        pre_feedforward_norm=scale(HIDDEN),
        post_feedforward_norm=scale(HIDDEN),
        next_norm=scale(HIDDEN),
        is_global=is_global,
        num_heads=HEADS,
        intermediate_size=INTERMEDIATE,
        query_scale=QUERY_SCALE,
        eps=EPS,
    )


def one_by_one(
    ops: Ops, layer: LayerOperands, state: State, rotary: Rotary, metadata: AttentionMetadata
) -> State:
    hidden, residual, keys, values = (tensor.clone() for tensor in state)
    qkv = ops.linear(hidden, layer.qkv)
    query = ops.qk_norm_rope_cache_write(
        qkv, layer.q_norm, layer.k_norm, *rotary, keys, values, metadata.slot_mapping, EPS
    )
    branch = ops.linear(
        ops.paged_attention(query, keys, values, metadata, QUERY_SCALE), layer.attention_output
    )
    hidden = ops.norm_add_norm(branch, residual, layer.post_attention_norm, layer.pre_feedforward_norm, EPS)
    branch = ops.linear(ops.geglu(ops.linear(hidden, layer.gate_up)), layer.down)
    return (
        ops.norm_add_norm(branch, residual, layer.post_feedforward_norm, layer.next_norm, EPS),
        residual,
        keys,
        values,
    )


def random_step(
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    window: int | None,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> tuple[State, Rotary, AttentionMetadata]:
    case = attention_case(
        7,
        query_lens,
        context_lens,
        window=window,
        dtype=dtype,
        cache_dtype=cache_dtype,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
    )
    generator = torch.Generator().manual_seed(9)
    num_tokens = sum(query_lens)
    hidden, residual = (torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    angles = torch.randn(num_tokens, HEAD_DIM // 2, generator=generator)
    return (hidden, residual, case.keys, case.values), (angles.cos(), angles.sin()), case.metadata


class Step:
    """Layers of both kinds, one after the other, and what they compute."""

    def __init__(
        self,
        query_lens: tuple[int, ...],
        context_lens: tuple[int, ...],
        dtype: torch.dtype,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        windows = {False: 64, True: None}
        kinds = {
            is_global: random_step(query_lens, context_lens, window, dtype, cache_dtype or dtype)
            for is_global, window in windows.items()
        }
        self.states = {kind: state for kind, (state, _, _) in kinds.items()}
        self.rotary = {
            False: kinds[False][1],
            True: (-kinds[True][1][0], kinds[True][1][1]),
        }  # not the same for both
        self.metadata = {kind: metadata for kind, (_, _, metadata) in kinds.items()}

    def caches(self, layers: Sequence[LayerOperands]) -> list[LayerCache]:
        return [
            LayerCache(*(tensor.clone() for tensor in self.states[layer.is_global][2:])) for layer in layers
        ]

    def one_by_one(
        self, ops: Ops, layers: Sequence[LayerOperands]
    ) -> tuple[torch.Tensor, torch.Tensor, list[LayerCache]]:
        hidden, residual = self.states[True][:2]
        caches = []
        for layer in layers:
            kind = layer.is_global
            state = hidden, residual, *self.states[kind][2:]
            hidden, residual, keys, values = one_by_one(
                ops, layer, state, self.rotary[kind], self.metadata[kind]
            )
            caches.append(LayerCache(keys, values))
        return hidden, residual, caches

    def whole(
        self, ops: Ops, layers: Sequence[LayerOperands], caches: Sequence[LayerCache]
    ) -> tuple[torch.Tensor, ...] | None:
        hidden, residual = (tensor.clone() for tensor in self.states[True][:2])
        done = ops.decoder_layers(layers, hidden, residual, self.rotary, caches, self.metadata)
        if not done:
            assert torch.equal(hidden, self.states[True][0])
            assert torch.equal(residual, self.states[True][1])
        return (hidden, residual) if done else None

    def assert_same(self, ops: Ops, layers: Sequence[LayerOperands], caches: Sequence[LayerCache]) -> None:
        hidden, residual, expected = self.one_by_one(ops, layers)
        whole = self.whole(ops, layers, caches)
        assert whole is not None
        pairs = [(whole[0], hidden), (whole[1], residual)]
        for got, wanted in zip(caches, expected, strict=True):
            pairs += [(got.keys, wanted.keys), (got.values, wanted.values)]
        for actual, right in pairs:
            torch.testing.assert_close(actual, right, rtol=0, atol=0, equal_nan=True)


def three_layers(ops: Ops, dtype: torch.dtype) -> list[LayerOperands]:
    return [operands(ops, dtype, is_global=seed == 1, seed=seed) for seed in range(3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", ["exact", "int8", "int4"])
@pytest.mark.parametrize(("query_lens", "context_lens"), BATCHES)
def test_whole_blocks_are_their_operations(
    query_lens: tuple[int, ...], context_lens: tuple[int, ...], weights: WeightStorage, dtype: torch.dtype
) -> None:
    ops = cpu_ops(dtype, weights)
    step, layers = Step(query_lens, context_lens, dtype, ops.cache_dtype), three_layers(ops, dtype)
    step.assert_same(ops, layers, step.caches(layers))


def test_another_network_another_cache_and_another_step_are_noticed() -> None:
    """What is kept between calls follows the objects."""
    ops = cpu_ops(torch.float32)
    layers = three_layers(ops, torch.float32)
    for query_lens, context_lens in BATCHES:
        step = Step(query_lens, context_lens, torch.float32)
        for _ in range(2):
            step.assert_same(ops, layers, step.caches(layers))
        caches = step.caches(layers[1:])
        step.assert_same(ops, layers[1:], caches)
        other = [operands(ops, torch.float32, is_global=layer.is_global, seed=9) for layer in layers[1:]]
        step.assert_same(ops, other, caches)  # each slot is written anew


def test_the_reference_and_odd_heads_stay_with_the_operations() -> None:
    step = Step((1,), (1,), torch.float32)
    reference = reference_ops(torch.float32)
    layers = three_layers(reference, torch.float32)
    assert step.whole(reference, layers, step.caches(layers)) is None
    plain = cpu_ops(torch.float32)
    layers = three_layers(plain, torch.float32)
    narrow = [
        LayerCache(cache.keys[..., :8].contiguous(), cache.values[..., :8].contiguous())
        for cache in step.caches(layers)
    ]
    assert step.whole(plain, layers, narrow) is None


def test_a_cache_beside_rounded_weights_is_bfloat16() -> None:
    expected: dict[WeightStorage, torch.dtype] = {
        "exact": torch.float32,
        "int8": torch.bfloat16,
        "int4": torch.bfloat16,
    }
    assert {weights: cpu_ops(torch.float32, weights).cache_dtype for weights in expected} == expected
    assert reference_ops(torch.float32).cache_dtype == torch.float32
    assert cpu_ops(torch.bfloat16).cache_dtype == torch.bfloat16
