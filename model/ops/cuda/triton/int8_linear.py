"""Triton kernel of a linear layer with int8 weights: each is read once, as a byte, and widened on its way to
the tensor cores.

For the few rows of a decode step, which is bound by reading weights. torch's own kernel
(``_weight_int8pack_mm``) gives a thread to every output: it reads weights without coalescing and uses no
tensor cores.
"""

import torch
import triton
import triton.language as tl

from model.ops.cuda.triton.common import product

MAX_ROWS = 256  # more rows are bound by arithmetic: there a widened copy of the weight is multiplied faster
COLUMNS = 64
DEPTHS = {
    torch.float32: 64,
    torch.bfloat16: 128,
}  # of a tile: so that three fit into the shared memory of any card
MAX_SPLITS = 8


@triton.jit(do_not_specialize=["num_rows"])
def int8_linear_kernel(
    x,
    weight,
    scales,
    output,
    num_rows,
    num_columns,
    depth,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    has_row, has_column = row < num_rows, column < num_columns
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(split * DEPTH, depth, SPLITS * DEPTH):
        place = start + tl.arange(0, DEPTH)
        has_place = place < depth
        left = tl.load(
            x + row[:, None].to(tl.int64) * depth + place, mask=has_row[:, None] & has_place, other=0.0
        )
        right = tl.load(
            weight + column[:, None].to(tl.int64) * depth + place,
            mask=has_column[:, None] & has_place,
            other=0,
        )
        total = product(left, tl.trans(right.to(tl.float32).to(left.dtype)), total)
    total *= tl.load(scales + column, mask=has_column, other=0.0)
    to = output + (split * num_rows + row)[:, None].to(tl.int64) * num_columns + column
    tl.store(to, total, mask=has_row[:, None] & has_column)


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, num_processors: int
) -> torch.Tensor:
    """Multiply x [n, in_features] by the transposed weight, int8 [out_features, in_features] times scales
    float32 [out_features] -> [n, out_features] in x's dtype.

    A layer with fewer columns than keep the device busy has its depth split, and the parts are added up in a
    fixed order. Launches depend on shapes alone, so that a CUDA graph may hold them.
    """
    num_rows, depth = x.shape
    num_columns = weight.shape[0]
    x = x.contiguous()
    tile_depth = DEPTHS[x.dtype]
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    tiles = triton.cdiv(num_columns, COLUMNS) * triton.cdiv(num_rows, rows)
    splits = max(1, min(MAX_SPLITS, 2 * num_processors // tiles, triton.cdiv(depth, tile_depth)))
    output = torch.empty((splits, num_rows, num_columns), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(num_columns, COLUMNS), triton.cdiv(num_rows, rows), splits)
    int8_linear_kernel[grid](
        x,
        weight,
        scales,
        output,
        num_rows,
        num_columns,
        depth,
        SPLITS=splits,
        ROWS=rows,
        COLUMNS=COLUMNS,
        DEPTH=tile_depth,
        num_warps=4,
        num_stages=3,
    )
    return (output[0] if splits == 1 else output.sum(0)).to(x.dtype)
