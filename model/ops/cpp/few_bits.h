// Weights of 4, 5 or 8 bits in groups of 32 inputs of a feature, w = scale * u + low with unsigned u, times activations rounded to
// 8 bits per row and group.
//
// A panel holds [k / 32] groups of vectors of 4 W bytes: W features times the 4 inputs of a quad. Of 4 bits, a group is 8 vectors,
// one per quad, whose low halves are the first W features and whose high halves the next. Of 5 bits, two vectors more hold the fifth
// bits, one for each W features: bit q belongs to quad q. Of 8 bits, 8 vectors hold the lower halves and 8 more the upper ones. A
// panel's scales are [k / 32][2][NR] float16: scale, then low. Sums within a group are exact, and groups are added in ascending
// order in float32, so a row's result never depends on its neighbours.
#pragma once

#include "linear.h"

namespace gemserve {

constexpr int64_t GROUP = 32, QUADS = GROUP / 4, VECTOR = 4 * W;  // inputs, quads of inputs, bytes
constexpr int64_t group_bytes(int bits) { return (bits == 8 ? 16 : bits == 5 ? 10 : 8) * VECTOR; }
constexpr int64_t SCALES = 2 * NR;  // float16 values of a group

// Rows rounded for a product: tile after tile, quads [k / 4][rows] of four int8 and factors [k / 32][2][rows]: the step of a group
// and the sum of its rounded inputs. The factors of a group with a value that is not finite are NaN.
struct RoundedRows {
  RowTiles tiles;
  int64_t k;
  const int32_t* quads;
  const float* factors;
  const int32_t* quads_of(int64_t tile) const { return quads + tiles.first(tile) * (k / 4); }
  const float* factors_of(int64_t tile) const { return factors + tiles.first(tile) * (k / GROUP * 2); }
};

// In memory of the calling thread that lasts until its next product.
RoundedRows round_rows(const void* x, bool x_bf16, int64_t m, int64_t k, int threads);

INLINE vi load_weights(const uint8_t* group, int bits, int64_t quad, int upper) {  // W features, or the W next
  const vi both = loadi(group + quad * VECTOR), halves = set1i(0x0f0f0f0f);
  const vi low = andi(upper ? shift_right<4>(both) : both, halves);
  if (bits != 5) return low;
  const vi fifth = loadi(group + (QUADS + upper) * VECTOR);
  return ori(low, andi(quad < 4 ? shift_left_by(fifth, 4 - static_cast<int>(quad)) : shift_right_by(fifth, static_cast<int>(quad) - 4),
                       set1i(0x10101010)));
}

// sums[MR][stride] = the rows of a tile times one panel.
template <int BITS, int MR>
INLINE void few_bits_tile(const int32_t* x, const float* factors, const uint8_t* b, const half* scales, int64_t k, float* sums,
                          int64_t stride) {
  for (int r = 0; r < MR; ++r)
    for (int j = 0; j < NR; j += W) store(sums + r * stride + j, zero());
  constexpr int PARTS = BITS == 5 ? 2 : 1, DEPTH = QUADS / PARTS;  // 4 quads of 31 * 127, or 8 of 15 * 127, stay in int16
  constexpr int64_t AHEAD = 6 * group_bytes(BITS);
  constexpr int H = MR <= 2 ? 2 : 1;  // halves of a panel side by side: few rows leave registers for both
  for (int64_t g = 0; g < k / GROUP; ++g, b += group_bytes(BITS), scales += SCALES, x += QUADS * MR, factors += 2 * MR) {
    if (MR <= 2) {
      for (int64_t line = 0; line < group_bytes(BITS); line += 64) prefetch(b + AHEAD + line);
      prefetch(scales + AHEAD / group_bytes(BITS) * SCALES);
    }
#pragma GCC unroll 2
    for (int first = 0; first < 2; first += H) {
      asm volatile("" ::: "memory");  // the compiler would rather keep the inputs of both halves, on the stack, than load them twice
      vi total[H][MR];
#pragma GCC unroll 2
      for (int part = 0; part < PARTS; ++part) {
        ByteSum sum[H][MR], upper[H][MR];
#pragma GCC unroll 8
        for (int q = part * DEPTH; q < (part + 1) * DEPTH; ++q)
#pragma GCC unroll 2
          for (int h = 0; h < H; ++h) {
            const vi weights = load_weights(b, BITS, q, first + h);
            const vi more = BITS == 8 ? load_weights(b + QUADS * VECTOR, BITS, q, first + h) : weights;
#pragma GCC unroll 16
            for (int r = 0; r < MR; ++r) {
              const vi inputs = set1i(x[q * MR + r]);
              sum[h][r].add(weights, inputs, q == part * DEPTH);
              if (BITS == 8) upper[h][r].add(more, inputs, q == part * DEPTH);
            }
          }
#pragma GCC unroll 2
        for (int h = 0; h < H; ++h)
#pragma GCC unroll 16
          for (int r = 0; r < MR; ++r) {
            total[h][r] = part == 0 ? sum[h][r].times(1) : addi(total[h][r], sum[h][r].times(1));
            if (BITS == 8) total[h][r] = addi(total[h][r], upper[h][r].times(16));
          }
      }
#pragma GCC unroll 2
      for (int h = 0; h < H; ++h) {
        const int64_t at = (first + h) * W;
        const vf scale = load_half(scales + at), low = load_half(scales + NR + at);
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
          float* to = sums + r * stride + at;
          const vf step = set1(factors[r]), rest = set1(factors[MR + r]);
          store(to, fma(low, rest, fma(mul(to_float(total[h][r]), step), scale, load(to))));
        }
      }
    }
  }
}

// A panel of the weight's data, which starts with the panels' places: int64 [panels + 1], bytes from its start.
struct Panel {
  const uint8_t* data;
  int bits;
  const half* scales;
};
inline Panel panel_of(const PackedWeight& weight, int64_t p) {
  const int64_t* places = static_cast<const int64_t*>(weight.data);
  const int64_t bytes = (places[p + 1] - places[p]) / (weight.k / GROUP);
  const half* scales = static_cast<const half*>(weight.scales) + p * (weight.k / GROUP) * SCALES;
  return {static_cast<const uint8_t*>(weight.data) + places[p], bytes == group_bytes(4) ? 4 : bytes == group_bytes(5) ? 5 : 8, scales};
}

// Data of a weight whose panels all are of the same bits, one after the other.
inline const uint8_t* first_panel_data(const PackedWeight& weight) {
  return static_cast<const uint8_t*>(weight.data) + *static_cast<const int64_t*>(weight.data);
}

void linear_few_bits(const PackedWeight& weight, const void* x, bool x_bf16, int64_t m, void* out, bool out_bf16, int threads);
void pack_few_bits(const PackedWeight& weight, const void* source, bool source_bf16, int threads);
// 4 bits of an int8 weight, the steps between a group's least and largest value; a group's errors add up to about nothing.
void pack_plain_four_bits(const PackedWeight& weight, const PackedWeight& int8, int threads);

}  // namespace gemserve
