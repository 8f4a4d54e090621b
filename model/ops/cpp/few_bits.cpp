// Products with weights of few bits (few_bits.h).
#include "few_bits.h"

#include <cmath>

namespace gemserve {
namespace {

template <class In>
void round_tile(const In* x, int64_t k, int rows, int32_t* quads, float* factors) {
  for (int r = 0; r < rows; ++r, x += k)
    for (int64_t g = 0; g < k / GROUP; ++g) {
      const In* from = x + g * GROUP;
      const auto [top, finite] = extent_of(from, GROUP);
      const vf inverse = set1(finite && top > SMALLEST ? 127.0f / top : 0.0f);
      alignas(64) int8_t rounded[GROUP];
      vi sum = set1i(0);
      for (int64_t i = 0; i < GROUP; i += W) {
        const vi v = to_int(max(set1(-127.0f), min(set1(127.0f), mul(load(from + i), inverse))));
        store_int8(rounded + i, v);
        sum = addi(sum, v);
      }
      for (int64_t q = 0; q < QUADS; ++q) std::memcpy(quads + (g * QUADS + q) * rows + r, rounded + 4 * q, 4);
      const float step = finite ? top / 127.0f : NAN;
      factors[2 * g * rows + r] = step;
      factors[(2 * g + 1) * rows + r] = step * sum_lanes(to_float(sum));  // exact below 2^24
    }
}

template <class In>
void round_tiles(const In* x, const RowTiles& tiles, int64_t k, int32_t* quads, float* factors, int threads) {
  parallel_for(tiles.count, tiles.m * k < 65536 ? 1 : threads, 1, [&](int64_t t) {
    const int64_t first = tiles.first(t);
    round_tile(x + first * k, k, tiles.rows(t), quads + first * (k / 4), factors + first * (k / GROUP * 2));
  });
}

template <class Out>
void multiply(const PackedWeight& weight, const RoundedRows& x, Out* out, int threads) {
  const int64_t k = weight.k, total = num_panels(weight.n), items = ceil_div(total, PANELS);
  constexpr int64_t stride = PANELS * NR;
  const int64_t chunk = std::max<int64_t>(1, items / (threads * 64));
  parallel_for(items, threads, chunk, [&](int64_t item) {
    const int64_t first_panel = item * PANELS, count = std::min<int64_t>(PANELS, total - first_panel);
    const int64_t n_valid = std::min(count * NR, weight.n - first_panel * NR);
    float* sums = workspace<float, kSums>(MAX_ROWS * stride);
    for (int64_t t = 0; t < x.tiles.count; ++t) {
      for (int64_t p = 0; p < count; ++p) {
        const Panel panel = panel_of(weight, first_panel + p);
        with_rows(x.tiles.rows(t), [&](auto rows) {
          constexpr int MR = decltype(rows)::value;
          const int32_t* quads = x.quads_of(t);
          const float* factors = x.factors_of(t);
          if (panel.bits == 4)
            few_bits_tile<4, MR>(quads, factors, panel.data, panel.scales, k, sums + p * NR, stride);
          else if (panel.bits == 5)
            few_bits_tile<5, MR>(quads, factors, panel.data, panel.scales, k, sums + p * NR, stride);
          else
            few_bits_tile<8, MR>(quads, factors, panel.data, panel.scales, k, sums + p * NR, stride);
        });
      }
      const int64_t at = x.tiles.first(t) * weight.n + first_panel * NR;
      write_rows(sums, stride, x.tiles.rows(t), n_valid, out + at, weight.n);
    }
  });
}

}  // namespace

RoundedRows round_rows(const void* x, bool x_bf16, int64_t m, int64_t k, int threads) {
  const RowTiles tiles(m);
  int32_t* quads = workspace<int32_t, kInputs>(m * (k / 4));
  float* factors = workspace<float, kWidened>(m * (k / GROUP * 2));
  if (x_bf16)
    round_tiles(static_cast<const bf16*>(x), tiles, k, quads, factors, threads);
  else
    round_tiles(static_cast<const float*>(x), tiles, k, quads, factors, threads);
  return {tiles, k, quads, factors};
}

void linear_few_bits(const PackedWeight& weight, const void* x, bool x_bf16, int64_t m, void* out, bool out_bf16, int threads) {
  const RoundedRows rows = round_rows(x, x_bf16, m, weight.k, threads);
  if (out_bf16)
    multiply(weight, rows, static_cast<bf16*>(out), threads);
  else
    multiply(weight, rows, static_cast<float*>(out), threads);
}

}  // namespace gemserve
