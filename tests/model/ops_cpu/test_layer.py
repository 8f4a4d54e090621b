"""A decoder block run as a whole is the single operations, bit for bit: hidden state, residual stream and cache."""

import pytest
import torch

from model.ops import AttentionMetadata, LayerOperands, Ops
from model.ops.cpu import CpuOps
from model.ops.cpu_weights import WeightStorage
from tests.model.ops_cpu.harness import CPU, DTYPES, attention_case, cpu_ops, needs_kernels, reference_ops

pytestmark = needs_kernels

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, EPS, QUERY_SCALE = 96, 160, 4, 2, 32, 1e-6, 0.2
BATCHES = [((1,), (1,)), ((1, 1, 1), (15, 160, 17)), ((1, 5, 1, 40), (300, 5, 1, 300)), ((70,), (70,))]
State = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # hidden, residual, keys, values
Rotary = tuple[torch.Tensor, torch.Tensor]


def operands(ops: Ops, dtype: torch.dtype) -> LayerOperands:
    generator = torch.Generator().manual_seed(2)

    def weight(n: int, k: int) -> torch.Tensor:
        return (torch.randn(n, k, generator=generator) * k**-0.5).to(dtype)

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
        num_heads=HEADS,
        intermediate_size=INTERMEDIATE,
        query_scale=QUERY_SCALE,
        eps=EPS,
    )


def one_by_one(ops: Ops, layer: LayerOperands, state: State, rotary: Rotary, metadata: AttentionMetadata) -> State:
    hidden, residual, keys, values = (tensor.clone() for tensor in state)
    qkv = ops.linear(hidden, layer.qkv)
    query = ops.qk_norm_rope_cache_write(qkv, layer.q_norm, layer.k_norm, *rotary, keys, values, metadata.slot_mapping, EPS)
    branch = ops.linear(ops.paged_attention(query, keys, values, metadata, QUERY_SCALE), layer.attention_output)
    hidden = ops.norm_add_norm(branch, residual, layer.post_attention_norm, layer.pre_feedforward_norm, EPS)
    branch = ops.linear(ops.geglu(ops.linear(hidden, layer.gate_up)), layer.down)
    return ops.norm_add_norm(branch, residual, layer.post_feedforward_norm, layer.next_norm, EPS), residual, keys, values


def random_step(
    query_lens: tuple[int, ...], context_lens: tuple[int, ...], window: int | None, dtype: torch.dtype
) -> tuple[State, Rotary, AttentionMetadata]:
    case = attention_case(
        7, query_lens, context_lens, window=window, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype
    )
    generator = torch.Generator().manual_seed(9)
    num_tokens = sum(query_lens)
    hidden, residual = (torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    angles = torch.randn(num_tokens, HEAD_DIM // 2, generator=generator)
    return (hidden, residual, case.keys, case.values), (angles.cos(), angles.sin()), case.metadata


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", ["exact", "int8", "int4"])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize(("query_lens", "context_lens"), BATCHES)
def test_a_whole_block_is_its_operations(
    query_lens: tuple[int, ...], context_lens: tuple[int, ...], window: int | None, weights: WeightStorage, dtype: torch.dtype
) -> None:
    ops = cpu_ops(dtype, weights)
    layer = operands(ops, dtype)
    state, rotary, metadata = random_step(query_lens, context_lens, window, dtype)
    expected = one_by_one(ops, layer, state, rotary, metadata)
    hidden, residual, keys, values = (tensor.clone() for tensor in state)
    assert ops.decoder_layer(layer, hidden, residual, rotary, keys, values, metadata)
    for got, wanted in zip((hidden, residual, keys, values), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_another_cache_and_another_step_are_noticed() -> None:
    """What is kept between calls, per layer and per step, follows the tensors."""
    ops = cpu_ops(torch.float32)
    layer = operands(ops, torch.float32)
    for query_lens, context_lens in BATCHES:
        state, rotary, metadata = random_step(query_lens, context_lens, None, torch.float32)
        expected = one_by_one(ops, layer, state, rotary, metadata)
        for _ in range(2):
            hidden, residual, keys, values = (tensor.clone() for tensor in state)
            assert ops.decoder_layer(layer, hidden, residual, rotary, keys, values, metadata)
            torch.testing.assert_close(keys, expected[2], rtol=0, atol=0, equal_nan=True)
            assert torch.equal(hidden, expected[0])


def test_batches_that_torch_multiplies_and_odd_heads_stay_with_the_operations() -> None:
    ops = CpuOps(CPU, torch.bfloat16, "int8", use_matrix_hardware=True)
    layer = operands(ops, torch.bfloat16)
    for num_tokens, whole in ((1, True), (7, True), (8, False)):
        (hidden, residual, keys, values), rotary, metadata = random_step((num_tokens,), (num_tokens,), None, torch.bfloat16)
        before = hidden.clone()
        assert ops.decoder_layer(layer, hidden, residual, rotary, keys, values, metadata) is whole
        assert torch.equal(hidden, before) is not whole
    (hidden, residual, keys, values), rotary, metadata = random_step((1,), (1,), None, torch.float32)
    reference = reference_ops(torch.float32)
    assert not reference.decoder_layer(operands(reference, torch.float32), hidden, residual, rotary, keys, values, metadata)
    narrow = keys[..., :8].contiguous()
    plain = cpu_ops(torch.float32)
    assert not plain.decoder_layer(operands(plain, torch.float32), hidden, residual, rotary, narrow, narrow.clone(), metadata)
