// Weights of 4, 5 or 8 bits in groups of 32 inputs of a feature, w = scale * (u - centre) + middle with
// unsigned u and the centre of its range, times activations rounded to 8 bits per row and group.
//
// A panel holds [k / 32] groups: the weights in vectors of 4 W bytes, W features times the 4 inputs of a
// quad; the scales, [NR] float16; and the middles likewise, unless all of the panel are zero, as those of 8
// bits are. Of 4 bits, a group is 8 vectors, one per quad, whose low halves are the first W features and
// whose high halves the next. Of 5 bits, 5 vectors for the first W features and 5 more for the next: their
// lower 5 bits are quads 0 to 4, and what is left holds the others (load_weights). Of 8 bits, 8 vectors hold
// the lower halves and 8 more the upper ones, both as those of 4 bits. Sums within a group are exact, and
// groups are added in ascending order in float32, so a row's result never depends on its neighbours.
#pragma once

#include "linear.h"

namespace gemserve {

constexpr int64_t GROUP = 32, QUADS = GROUP / 4, VECTOR = 4 * W;  // inputs, quads of inputs, bytes
// How often a quad of inputs stands in memory: a vector of copies is an operand of the product itself, where
// an instruction to copy it would be one more for every product. AVX-512 copies as it loads.
constexpr int64_t COPIES = W == 8 ? W : 1;
constexpr int64_t MOST_ROWS = 96;  // rounded at once, so that all those copies stay in a cache
constexpr int64_t SCALES_BYTES = NR * sizeof(half);
constexpr int centre_of(int bits) { return 1 << (bits - 1); }
constexpr int64_t weights_bytes(int bits) { return (bits == 8 ? 16 : bits == 5 ? 10 : 8) * VECTOR; }
constexpr int64_t group_bytes(int bits, bool has_middle) {
  return weights_bytes(bits) + SCALES_BYTES * (has_middle ? 2 : 1);
}
constexpr uint8_t form_of(int bits, bool has_middle) {
  return static_cast<uint8_t>(bits + (has_middle ? 16 : 0));
}

// Rows rounded for a product, tile after tile: quads [k / 4][rows][COPIES] of four int8; factors [k /
// 32][2][rows], the step of a group and the sum of its rounded inputs times it; starts [k / 32][2][rows],
// minus 8 and minus 16 times that sum as a ByteSum begins with it, which moves weights of 4 and of 5 bits to
// their centre. The factors of a group with a value that is not finite are NaN.
struct RoundedRows {
  RowTiles tiles;
  int64_t k;
  const int32_t* quads;
  const float* factors;
  const int32_t* starts;
  const int32_t* quads_of(int64_t tile) const { return quads + tiles.first(tile) * (k / 4) * COPIES; }
  const float* factors_of(int64_t tile) const { return factors + tiles.first(tile) * (k / GROUP * 2); }
  const int32_t* starts_of(int64_t tile) const { return starts + tiles.first(tile) * (k / GROUP * 2); }
};

// In memory of the calling thread that lasts until its next product. With ``dither`` [k], the starts for 4
// bits are for weights that are scale * (u + dither - centre) + middle, to the nearest integer.
RoundedRows round_rows(const void* x, bool x_bf16, int64_t m, int64_t k, int threads,
                       const float* dither = nullptr);

// A panel of the weight's data, which starts with the panels' places: int64 [panels + 1], bytes from its
// start.
struct Panel {
  const uint8_t* data;
  int bits;
  bool has_middle;
  int64_t stride() const { return group_bytes(bits, has_middle); }
};
inline Panel panel_of(const PackedWeight& weight, int64_t p) {
  const int64_t* places = static_cast<const int64_t*>(weight.data);
  const int64_t bytes = (places[p + 1] - places[p]) / (weight.k / GROUP);
  const int bits = bytes < weights_bytes(5) + SCALES_BYTES ? 4 : bytes < weights_bytes(8) ? 5 : 8;
  return {static_cast<const uint8_t*>(weight.data) + places[p], bits, bytes == group_bytes(bits, true)};
}

// The weights of a quad and W features: the first of the panel, or the W next. For 8 bits, their lower
// halves.
template <int BITS>
INLINE vi load_weights(const uint8_t* group, int quad, int upper) {
  if (BITS != 5) {
    const vi both = loadi(group + quad * VECTOR);
    return andi(upper ? shift_right<4>(both) : both, set1i(0x0f0f0f0f));
  }
  const auto vector = [&](int i) { return loadi(group + (5 * upper + i) * VECTOR); };
  const vi five = set1i(0x1f1f1f1f);
  if (quad < 5) return andi(vector(quad), five);
  const auto bits = [&](int i, int32_t which) { return andi(vector(i), set1i(which)); };
  const vi three = and_not(five, vector(quad - 5));  // the upper ones, to which two are added from below
  const vi two = quad < 7 ? shift_right<3>(bits(quad - 2, static_cast<int32_t>(0xc0c0c0c0)))
                          : ori(shift_right<1>(bits(3, 0x20202020)), shift_right<2>(bits(4, 0x20202020)));
  return shift_right<3>(ori(three, two));
}

INLINE vi load_inputs(const int32_t* quad) { return COPIES == W ? loadi(quad) : set1i(*quad); }

// sums[MR][stride] = the rows of a tile times one panel. While the products of a group are added up, the sums
// of the one before become floating-point numbers: one after the other, these would leave the processor
// waiting.
template <int BITS, bool MIDDLE, int MR>
INLINE void few_bits_tile(const int32_t* x, const float* factors, const int32_t* starts, const uint8_t* b,
                          int64_t k, float* sums, int64_t stride) {
  constexpr int64_t bytes = group_bytes(BITS, MIDDLE), AHEAD = 12 * bytes;
  constexpr bool FEW = MR <= 2;
  // Halves of a panel side by side: few rows leave registers for both, and for their sums.
  constexpr int H = FEW ? 2 : 1;
  vf kept[2][MR];
  for (int r = 0; r < MR; ++r)
    for (int h = 0; h < 2; ++h) FEW ? void(kept[h][r] = zero()) : store(sums + r * stride + h * W, zero());

  // What is not finished yet: before the first group, sums that add nothing.
  static constexpr float NOTHING[2 * MR] = {};
  ByteSum last[H][MR], last_upper[H][MR];
  for (int h = 0; h < H; ++h)
    for (int r = 0; r < MR; ++r) last[h][r].start(set1i(0)), last_upper[h][r].start(set1i(0));
  const float* last_factors = NOTHING;
  const half* last_scales = reinterpret_cast<const half*>(b + weights_bytes(BITS)) + (2 - H) * W;
  vf scale[H], middle[H];
  const auto load_scales = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) {
      scale[h] = load_half(last_scales + h * W);
      middle[h] = MIDDLE ? load_half(last_scales + NR + h * W) : zero();
    }
  };
  const auto finish = [&](int first, int h, int r) __attribute__((always_inline)) {
    const vi total = BITS == 8 ? addi(last[h][r].times(1), last_upper[h][r].times(16)) : last[h][r].times(1);
    float* to = sums + r * stride + (first + h) * W;
    vf result =
        fma(mul(to_float(total), set1(last_factors[r])), scale[h], FEW ? kept[first + h][r] : load(to));
    if (MIDDLE) result = fma(middle[h], set1(last_factors[MR + r]), result);
    FEW ? void(kept[first + h][r] = result) : store(to, result);
  };

  for (int64_t g = 0; g < k / GROUP;
       ++g, b += bytes, x += QUADS * MR * COPIES, factors += 2 * MR, starts += 2 * MR) {
    if (FEW)
      for (int64_t line = 0; line < bytes; line += 64) prefetch(b + AHEAD + line);
#pragma GCC unroll 2
    for (int first = 0; first < 2; first += H) {
      asm volatile("" ::
                       : "memory");  // the compiler would rather keep the inputs of both halves, on the
                                     // stack, than load them twice
      load_scales();
      ByteSum sum[H][MR], upper[H][MR];
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
        const vi start = set1i(starts[(BITS == 5) * MR + r]);
#pragma GCC unroll 2
        for (int h = 0; h < H; ++h) {
          sum[h][r].start(BITS == 8 ? set1i(0) : start);
          upper[h][r].start(start);
        }
      }
#pragma GCC unroll 8
      for (int q = 0; q < QUADS; ++q) {
#pragma GCC unroll 2
        for (int h = 0; h < H; ++h) {
          const vi weights = load_weights<BITS>(b, q, first + h);
          const vi more = BITS == 8 ? load_weights<BITS>(b + QUADS * VECTOR, q, first + h) : weights;
#pragma GCC unroll 16
          for (int r = 0; r < MR; ++r) {
            const vi inputs = load_inputs(x + (q * MR + r) * COPIES);
            sum[h][r].add(weights, inputs);
            if (BITS == 8) upper[h][r].add(more, inputs);
          }
        }
#pragma GCC unroll 4
        for (int i = q * H * MR / QUADS; i < (q + 1) * H * MR / QUADS; ++i)
          finish(FEW ? 0 : 1 - first, i / MR, i % MR);
      }
#pragma GCC unroll 2
      for (int h = 0; h < H; ++h)
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) last[h][r] = sum[h][r], last_upper[h][r] = upper[h][r];
      last_factors = factors;
      last_scales = reinterpret_cast<const half*>(b + weights_bytes(BITS)) + first * W;
    }
  }
  load_scales();
#pragma GCC unroll 16
  for (int i = 0; i < H * MR; ++i) finish(2 - H, i / MR, i % MR);
  for (int r = 0; r < MR && FEW; ++r)
    for (int h = 0; h < 2; ++h) store(sums + r * stride + h * W, kept[h][r]);
}

void linear_few_bits(const PackedWeight& weight, const void* x, bool x_bf16, int64_t m, void* out,
                     bool out_bf16, int threads);
void pack_few_bits(const PackedWeight& weight, const void* source, bool source_bf16, int threads);
// An int8 weight in 4 bits with a dither, scale * (u + dither - centre) + middle: the steps between a group's
// least and largest value; a group's errors add up to about nothing.
void pack_dithered_four_bits(const PackedWeight& weight, const PackedWeight& int8, const float* dither,
                             int threads);

}  // namespace gemserve
