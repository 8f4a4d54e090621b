"""What the kernels share: rounding and products that mean the same on a device and under Triton's
interpreter.

The interpreter (TRITON_INTERPRET=1, read when the kernels are imported) runs kernels on the CPU with numpy,
which has no bfloat16: it truncates where a device rounds, and multiplies the bit patterns of bfloat16
operands. Both are stated here in terms that it does right.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round float32 x to dtype, to nearest, ties to even."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def product(a, b, accumulator):
    """Compute accumulator + a @ b in float32 for operands as they lie in memory: exact products, never
    TF32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision="ieee")


@triton.jit
def weighted_sum(weights, values, accumulator):
    """Compute accumulator + weights @ values for float32 weights in [0, 1]; with bfloat16 values on tensor
    cores.

    A weight goes in as the sum of two bfloat16 numbers, which leaves it 16 bits: rounded to one, every weight
    would be off by up to 2^-9, and the sum no longer be one of float32.
    """
    if INTERPRETED or values.dtype == tl.float32:
        return tl.dot(weights, values.to(tl.float32), accumulator, input_precision="ieee")
    high = weights.to(values.dtype)
    low = (weights - high.to(tl.float32)).to(values.dtype)
    accumulator = tl.dot(high, values, accumulator)
    return tl.dot(low, values, accumulator)
