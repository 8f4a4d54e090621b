"""Norms, GeGLU, and the fused QK-norm, rotation and cache write. Each value is rounded to its tensor's type
once."""

import torch
import triton
import triton.language as tl

from model.ops.cuda.triton.common import INTERPRETED, rounded

GEGLU_COLUMNS = 1024  # of one program
ROPE_TOKENS = 8  # of one program at most; fewer where there would not be so many programs per head:
ROPE_PROGRAMS = 2 if INTERPRETED else 16


@triton.jit
def _normed(wide, scale, size, eps):
    return wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps) * scale


@triton.jit
def rms_norm_kernel(x, scale, output, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    places = tl.program_id(0).to(tl.int64) * SIZE + columns
    wide = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(scale + columns, mask=inside, other=0.0)
    tl.store(
        output + places, rounded(_normed(wide, factors, SIZE, eps), output.dtype.element_ty), mask=inside
    )


@triton.jit
def norm_add_norm_kernel(
    branch, residual, post_scale, next_scale, output, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    places = tl.program_id(0).to(tl.int64) * SIZE + columns
    kind = output.dtype.element_ty
    wide = tl.load(branch + places, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(post_scale + columns, mask=inside, other=0.0)
    normed = rounded(_normed(wide, factors, SIZE, eps), kind).to(tl.float32)
    stream = tl.load(residual + places, mask=inside, other=0.0).to(tl.float32) + normed
    stream_rounded = rounded(stream, kind)
    tl.store(residual + places, stream_rounded, mask=inside)
    factors = tl.load(next_scale + columns, mask=inside, other=0.0)
    tl.store(
        output + places,
        rounded(_normed(stream_rounded.to(tl.float32), factors, SIZE, eps), kind),
        mask=inside,
    )


@triton.jit
def geglu_kernel(gate_up, output, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up + row * (2 * SIZE) + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    # x (1 + tanh(u)) / 2 is x / (1 + exp(-2 u)), which needs no tanh and has the right limits on both sides.
    inner = 0.7978845608028654 * gate * (1.0 + 0.044715 * gate * gate)
    gelu = gate / (1.0 + tl.exp(-2.0 * inner))
    tl.store(output + row * SIZE + columns, rounded(gelu * up, output.dtype.element_ty), mask=inside)


@triton.jit
def _norm_and_rotate(
    first, second, scale, cos, sin, halves, inside, eps, HEAD_DIM: tl.constexpr, kind: tl.constexpr
):
    """Normalise and rotate one head of T tokens -> both halves [T, D / 2], float32."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    in_half = halves < HEAD_DIM // 2
    first = first * factor * tl.load(scale + halves, mask=in_half, other=0.0)[None, :]
    second = second * factor * tl.load(scale + HEAD_DIM // 2 + halves, mask=in_half, other=0.0)[None, :]
    cosine = tl.load(cos, mask=inside, other=0.0)
    sine = tl.load(sin, mask=inside, other=0.0)
    return rounded(first * cosine - second * sine, kind), rounded(second * cosine + first * sine, kind)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slot_mapping"])
def qk_norm_rope_kernel(
    qkv,
    q_scale,
    k_scale,
    cos,
    sin,
    k_cache,
    v_cache,
    slot_mapping,
    query,
    num_tokens,
    eps,
    k_block_stride,
    k_slot_stride,
    v_block_stride,
    v_slot_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    head = tl.program_id(1)
    halves = tl.arange(0, HALF_BLOCK)
    half: tl.constexpr = HEAD_DIM // 2
    inside = (tokens < num_tokens)[:, None] & (halves < half)[None, :]
    source = (
        qkv
        + (tokens * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM) + head * HEAD_DIM)[:, None]
        + halves[None, :]
    )
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + half, mask=inside, other=0.0)
    cosines = cos + (tokens * half)[:, None] + halves[None, :]
    sines = sin + (tokens * half)[:, None] + halves[None, :]
    kind = query.dtype.element_ty
    if head < NUM_HEADS:
        first, second = _norm_and_rotate(
            first, second, q_scale, cosines, sines, halves, inside, eps, HEAD_DIM, kind
        )
        target = query + (tokens * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM)[:, None] + halves[None, :]
        tl.store(target, first, mask=inside)
        tl.store(target + half, second, mask=inside)
    else:
        slots = tl.load(slot_mapping + tokens, mask=tokens < num_tokens, other=-1)
        written = inside & (slots >= 0)[:, None]
        if head < NUM_HEADS + NUM_KV_HEADS:
            first, second = _norm_and_rotate(
                first, second, k_scale, cosines, sines, halves, inside, eps, HEAD_DIM, kind
            )
            row = k_cache + slots // BLOCK_SIZE * k_block_stride + slots % BLOCK_SIZE * k_slot_stride
            target = (row + (head - NUM_HEADS) * HEAD_DIM)[:, None] + halves[None, :]
            tl.store(target, first, mask=written)
            tl.store(target + half, second, mask=written)
        else:
            row = v_cache + slots // BLOCK_SIZE * v_block_stride + slots % BLOCK_SIZE * v_slot_stride
            target = (row + (head - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM)[:, None] + halves[None, :]
            tl.store(target, first, mask=written)
            tl.store(target + half, second, mask=written)


def _row_warps(block: int) -> int:
    return min(16, max(1, block // 256))


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.contiguous()
    output = torch.empty_like(x)
    size = x.shape[-1]
    if x.numel():
        block = triton.next_power_of_2(size)
        rms_norm_kernel[(x.numel() // size,)](
            x, scale, output, eps, SIZE=size, BLOCK=block, num_warps=_row_warps(block)
        )
    return output


def norm_add_norm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    post_scale: torch.Tensor,
    next_scale: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    branch = branch.contiguous()
    assert residual.is_contiguous()
    output = torch.empty_like(residual)
    size = residual.shape[-1]
    if residual.numel():
        block = triton.next_power_of_2(size)
        norm_add_norm_kernel[(residual.numel() // size,)](
            branch,
            residual,
            post_scale,
            next_scale,
            output,
            eps,
            SIZE=size,
            BLOCK=block,
            num_warps=_row_warps(block),
        )
    return output


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty((num_rows, size))
    if output.numel():
        geglu_kernel[(num_rows, triton.cdiv(size, GEGLU_COLUMNS))](
            gate_up, output, SIZE=size, BLOCK=GEGLU_COLUMNS
        )
    return output


def qk_norm_rope_cache_write(
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
    num_tokens = qkv.shape[0]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    query = qkv.new_empty((num_tokens, num_heads, head_dim))
    if num_tokens:
        tokens = min(ROPE_TOKENS, triton.next_power_of_2(triton.cdiv(num_tokens, ROPE_PROGRAMS)))
        qk_norm_rope_kernel[(triton.cdiv(num_tokens, tokens), num_heads + 2 * num_kv_heads)](
            qkv.contiguous(),
            q_scale,
            k_scale,
            cos.contiguous(),
            sin.contiguous(),
            k_cache,
            v_cache,
            slot_mapping,
            query,
            num_tokens,
            eps,
            k_cache.stride(0),
            k_cache.stride(1),
            v_cache.stride(0),
            v_cache.stride(1),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            TOKENS=tokens,
            HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
            num_warps=4 if tokens > 1 else 1,
        )
    return query
