"""The reference operations against direct formulas, on odd shapes and with everything unwritten poisoned with
NaN."""

import math
import random
from dataclasses import replace

import pytest
import torch

from model.interface.kv_cache_spec import KVCacheSpec
from model.interface.running_batch import RunningBatch
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import SequenceChunk, StepInput
from model.network.forward_batch import forward_batch, lay_out
from model.ops import reference as reference_module
from model.ops.interface import AttentionMetadata
from model.ops.reference import ReferenceOps, inverse_cdf

CPU = torch.device("cpu")
OPS = ReferenceOps(CPU, torch.float32)
BFLOAT16_OPS = ReferenceOps(CPU, torch.bfloat16)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def attention_case(
    lengths: list[tuple[int, int]], window: int, block_size: int, kv_heads: int, head_dim: int, seed: int
) -> tuple[
    AttentionMetadata, AttentionMetadata, list[torch.Tensor], list[torch.Tensor], torch.Tensor, torch.Tensor
]:
    """(global and local metadata, each sequence's keys and values, both caches) for (context, queries) per
    sequence."""
    gen, shuffled = generator(seed), random.Random(seed)
    num_blocks = 1 + sum(-(-context // block_size) for context, _ in lengths)
    free = list(range(1, num_blocks))
    shuffled.shuffle(free)
    k_cache = torch.full((num_blocks, block_size, kv_heads, head_dim), torch.nan)
    v_cache = k_cache.clone()
    running = RunningBatch(len(lengths), num_blocks)
    chunks, keys, values = [], [], []
    for context, queries in lengths:
        table = [free.pop() for _ in range(-(-context // block_size))]
        key, value = (torch.randn(context, kv_heads, head_dim, generator=gen) for _ in range(2))
        for position in range(context):
            k_cache[table[position // block_size], position % block_size] = key[position]
            v_cache[table[position // block_size], position % block_size] = value[position]
        gone = max(0, context - queries - window + 1) // block_size  # recycled from the local table
        local_table = [0] * gone + table[gone:]
        row = running.add([5] * context, context, SamplingParams(1))
        running.set_row_blocks(row, table, local_table)
        chunks.append(SequenceChunk(row, [5] * queries, context - queries, samples=False))
        keys.append(key)
        values.append(value)
    spec = KVCacheSpec(block_size, window, 1, 1, 1)
    layout = lay_out(StepInput(running, prefills=chunks), spec, with_tables=True)
    assert layout.token_ids is not None
    assert layout.block_tables is not None
    tensors = torch.from_numpy(layout.token_ids), torch.from_numpy(layout.block_tables)
    batch = forward_batch(layout, *tensors, spec, CPU)
    return batch.global_attention, batch.local_attention, keys, values, k_cache, v_cache


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """One sequence, all heads, straight from the definition, in float64."""
    num_queries, num_heads, _ = query.shape
    context = len(key)
    group = num_heads // key.shape[1]
    key, value = (x.double().repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    for j in range(num_queries):
        position = context - num_queries + j
        for s in range(context):
            if s > position or (window is not None and s <= position - window):
                scores[:, j, s] = -math.inf
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


@pytest.mark.parametrize(("num_heads", "kv_heads"), [(4, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("max_scores", [1 << 23, 200])
def test_paged_attention_equals_dense_attention(
    num_heads: int, kv_heads: int, max_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the small one slices the queries of long prefills
    monkeypatch.setattr(reference_module, "MAX_SCORES", max_scores)
    window, block_size, head_dim = 8, 4, 6
    lengths = [(1, 1), (3, 3), (8, 1), (9, 1), (30, 1), (31, 1), (17, 5), (8, 8), (40, 40), (33, 2), (24, 9)]
    global_metadata, local_metadata, keys, values, k_cache, v_cache = attention_case(
        lengths, window, block_size, kv_heads, head_dim, seed=num_heads
    )
    queries = [torch.randn(count, num_heads, head_dim, generator=generator(count)) for _, count in lengths]
    for metadata, width in ((global_metadata, None), (local_metadata, window)):
        output = OPS.paged_attention(torch.cat(queries), k_cache, v_cache, metadata, 0.3)
        expected = [
            dense_attention(q, k, v, 0.3, width) for q, k, v in zip(queries, keys, values, strict=True)
        ]
        # float32 against float64 on sums of a few dozen terms
        torch.testing.assert_close(output.double(), torch.cat(expected).flatten(1), rtol=0, atol=1e-5)


def test_a_captured_step_reads_what_the_tensor_of_lengths_says_and_nothing_for_padding() -> None:
    """There the host's copies are upper bounds, which lead far into memory that nobody has written."""
    lengths = [(21, 1), (4, 1), (9, 1)]
    whole, local, _, _, k_cache, v_cache = attention_case(lengths, 8, 4, 2, 16, seed=3)
    query = torch.randn(4, 4, 16, generator=generator(1))
    for metadata in (whole, local):
        expected = OPS.paged_attention(query[:3], k_cache, v_cache, metadata, 0.3)
        width = metadata.block_table.shape[1]
        captured = replace(
            metadata,
            query_lens=(1,) * 4,
            context_lens=(4 * width,) * 4,
            query_start=torch.arange(5, dtype=torch.int32),
            context_lens_tensor=torch.cat([metadata.context_lens_tensor, torch.zeros(1, dtype=torch.int32)]),
            block_table=torch.cat([metadata.block_table, torch.zeros(1, width, dtype=torch.int32)]),
        )
        assert torch.equal(OPS.paged_attention(query, k_cache, v_cache, captured, 0.3)[:3], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qk_norm_rope_and_cache_write(dtype: torch.dtype) -> None:
    gen = generator()
    num_tokens, num_heads, kv_heads, head_dim, block_size = 5, 3, 2, 8, 4
    qkv = torch.randn(num_tokens, (num_heads + 2 * kv_heads) * head_dim, generator=gen).to(dtype)
    q_scale, k_scale = (1 + 0.3 * torch.randn(head_dim, generator=gen) for _ in range(2))
    angles = torch.rand(num_tokens, head_dim // 2, generator=gen) * 6
    k_cache = torch.full((6, block_size, kv_heads, head_dim), torch.nan, dtype=dtype)
    v_cache = k_cache.clone()
    slots = torch.tensor([4, 23, 9, 10, 17])
    ops = ReferenceOps(CPU, dtype)
    query = ops.qk_norm_rope_cache_write(
        qkv, q_scale, k_scale, angles.cos(), angles.sin(), k_cache, v_cache, slots, 1e-6
    )
    assert query.dtype == dtype
    heads = qkv.view(num_tokens, -1, head_dim).double()

    def rotated(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale
        as_complex = torch.complex(x[..., : head_dim // 2], x[..., head_dim // 2 :])
        turned = as_complex * torch.polar(torch.ones(1, dtype=torch.float64), angles.double())[:, None]
        return torch.cat((turned.real, turned.imag), -1)

    # bfloat16: one rounding, 2^-8 of values up to 4
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    torch.testing.assert_close(query.double(), rotated(heads[:, :num_heads], q_scale), rtol=0, atol=tolerance)
    expected_keys = rotated(heads[:, num_heads : num_heads + kv_heads], k_scale)
    torch.testing.assert_close(
        k_cache.view(-1, kv_heads, head_dim)[slots].double(), expected_keys, rtol=0, atol=tolerance
    )
    torch.testing.assert_close(
        v_cache.view(-1, kv_heads, head_dim)[slots].double(), heads[:, -kv_heads:], rtol=0, atol=0
    )
    untouched = torch.ones(24, dtype=torch.bool)
    untouched[slots] = False
    assert k_cache.view(-1, kv_heads, head_dim)[untouched].isnan().all()


def test_norms_multiply_in_float32_before_the_cast() -> None:
    gen = generator()
    x = torch.randn(7, 33, generator=gen).bfloat16() * 30
    scale = 1 + torch.randn(33, generator=gen)
    wide = x.double()
    expected = (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale).to(torch.bfloat16)
    actual = BFLOAT16_OPS.rms_norm(x, scale, 1e-6)
    assert actual.dtype == torch.bfloat16
    # Rounded once: at most one unit in the last place where float32 and float64 fall on two sides of a tie.
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=0)


def test_norm_add_norm_updates_the_residual_in_place() -> None:
    gen = generator()
    branch, residual = torch.randn(5, 16, generator=gen), torch.randn(5, 16, generator=gen)
    post, following = 1 + torch.randn(16, generator=gen), 1 + torch.randn(16, generator=gen)
    expected = residual + OPS.rms_norm(branch, post, 1e-6)
    normed = OPS.norm_add_norm(branch, residual, post, following, 1e-6)
    torch.testing.assert_close(residual, expected)
    torch.testing.assert_close(normed, OPS.rms_norm(expected, following, 1e-6))


def test_geglu_uses_the_tanh_approximation() -> None:
    gate_up = torch.randn(4, 10, generator=generator())
    gate, up = gate_up[:, :5].double(), gate_up[:, 5:].double()
    gelu = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    torch.testing.assert_close(OPS.geglu(gate_up).double(), gelu * up, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 70])
def test_bfloat16_linear_is_the_rounded_float32_product(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_module, "WEIGHT_SLICE_ELEMENTS", 100)  # several slices, the last one short
    gen = generator()
    x = torch.randn(rows, 24, generator=gen).bfloat16()
    weight = torch.randn(37, 24, generator=gen).bfloat16()
    exact = x.double() @ weight.double().T
    packed = BFLOAT16_OPS.pack_linear(weight, "head")
    logits = BFLOAT16_OPS.logits(x, packed)
    assert logits.dtype == torch.float32
    # float32 sums of 24 exact products
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
    product = BFLOAT16_OPS.linear(x, packed)
    assert product.dtype == torch.bfloat16
    torch.testing.assert_close(product.double(), exact, rtol=2**-8, atol=1e-5)  # rounded once


@pytest.mark.parametrize("k", [1, 2, 5, 49, 50])
def test_top_candidates_break_ties_by_id_even_at_the_border(k: int) -> None:
    logits = torch.randint(-3, 3, (40, 50), generator=generator()).float()
    logits[logits == -3] = -math.inf
    temperature = torch.linspace(0.1, 2.0, 40)
    values, token_ids, log_total = OPS.top_candidates(logits, k, temperature)
    for row in range(40):
        expected = sorted(range(50), key=lambda i: (-logits[row, i].item(), i))[:k]
        assert token_ids[row].tolist() == expected
        assert values[row].tolist() == logits[row, expected].tolist()
    expected_total = (
        ((logits - logits.amax(-1, keepdim=True)).double() / temperature[:, None]).exp().sum(-1).log()
    )
    torch.testing.assert_close(log_total.double(), expected_total, rtol=1e-5, atol=1e-5)


def test_argmax_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(3, 1000)
    logits[1, [900, 17, 500]] = 2.0
    logits[2, [3, 999]] = 1.0
    assert OPS.argmax(logits).tolist() == [0, 17, 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_all_finite_tells_bad_rows(bad: float) -> None:
    logits = torch.randn(4, 100, generator=generator())
    logits[2, 37] = bad
    assert OPS.all_finite(logits).tolist() == [True, True, False, True]


def test_inverse_cdf_never_draws_what_has_no_weight() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 0.0]]).repeat(5, 1)
    uniform = torch.tensor([0.0, 0.3333, 0.3334, 0.9, 1 - 2.0**-53], dtype=torch.float64)
    assert inverse_cdf(weights, uniform).tolist() == [1, 1, 3, 3, 3]


def test_draw_follows_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, -math.inf, 2.0, -5.0])
    count = 4000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    expanded = logits.expand(count, 5).contiguous()
    temperature, everything, no_cut = (
        torch.full((count,), 0.7),
        torch.ones(count, dtype=torch.float64),
        torch.zeros(count),
    )
    drawn = OPS.draw(expanded, temperature, everything, no_cut, uniform)
    frequencies = torch.bincount(drawn, minlength=5) / count
    # Evenly spaced uniforms: each frequency is off by at most one draw.
    torch.testing.assert_close(frequencies, (logits / 0.7).softmax(0), rtol=0, atol=1.5 / count)
    cut = OPS.draw(expanded, temperature, everything, torch.full((count,), 0.1), uniform)
    assert set(cut.tolist()) == {1, 3}
    nucleus = OPS.draw(expanded, temperature, 0.5 * everything, no_cut, uniform)
    kept, mass = set(), 0.0
    for token, share in sorted(enumerate((logits / 0.7).softmax(0).tolist()), key=lambda item: -item[1]):
        if mass < 0.5:
            kept.add(token)
        mass += share
    assert set(nucleus.tolist()) == kept
