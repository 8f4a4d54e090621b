// Products with weights of few bits (few_bits.h).
#include "few_bits.h"

#include <cmath>

namespace gemserve {
namespace {

template <class In>
void round_tile(const In* x, int64_t k, int rows, const float* dither, int32_t* quads, float* factors,
                int32_t* starts) {
  for (int r = 0; r < rows; ++r, x += k)
    for (int64_t g = 0; g < k / GROUP; ++g) {
      const In* from = x + g * GROUP;
      const auto [top, finite] = extent_of(from, GROUP);
      const vf inverse = set1(finite && top > SMALLEST ? 127.0f / top : 0.0f);
      alignas(64) int8_t rounded[GROUP];
      for (int64_t i = 0; i < GROUP; i += W)
        store_int8(rounded + i, to_int(max(set1(-127.0f), min(set1(127.0f), mul(load(from + i), inverse)))));
      int32_t first_two = 0, last_two = 0;  // of every quad
      for (int64_t q = 0; q < QUADS; ++q) {
        int32_t quad;
        std::memcpy(&quad, rounded + 4 * q, 4);
        std::fill_n(quads + ((g * QUADS + q) * rows + r) * COPIES, COPIES, quad);
        first_two += rounded[4 * q] + rounded[4 * q + 1];
        last_two += rounded[4 * q + 2] + rounded[4 * q + 3];
      }
      const float step = finite ? top / 127.0f : NAN;
      factors[2 * g * rows + r] = step;
      factors[(2 * g + 1) * rows + r] = step * static_cast<float>(first_two + last_two);
      float shift = 0.0f;  // of the sum, by the dither
      for (int64_t i = 0; i < GROUP && dither; ++i)
        shift += dither[g * GROUP + i] * static_cast<float>(rounded[i]);
      starts[2 * g * rows + r] =
          ByteSum::start_of(-8 * first_two, -8 * last_two + static_cast<int32_t>(std::nearbyint(shift)));
      starts[(2 * g + 1) * rows + r] = ByteSum::start_of(-16 * first_two, -16 * last_two);
    }
}

template <class In>
void round_tiles(const In* x, const RowTiles& tiles, int64_t k, const float* dither, int32_t* quads,
                 float* factors, int32_t* starts, int threads) {
  parallel_for(tiles.count, tiles.m * k < 65536 ? 1 : threads, 1, [&](int64_t t) {
    const int64_t first = tiles.first(t), at = first * (k / GROUP * 2);
    round_tile(x + first * k, k, tiles.rows(t), dither, quads + first * (k / 4) * COPIES, factors + at,
               starts + at);
  });
}

// Calls body(BITS, MIDDLE), both as types.
template <class Body>
INLINE void with_form(const Panel& panel, const Body& body) {
  const auto with_bits = [&](auto bits) {
    panel.has_middle ? body(bits, std::true_type()) : body(bits, std::false_type());
  };
  if (panel.bits == 4)
    with_bits(std::integral_constant<int, 4>());
  else if (panel.bits == 5)
    with_bits(std::integral_constant<int, 5>());
  else
    body(std::integral_constant<int, 8>(), std::false_type());
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
        with_form(panel, [&](auto bits, auto has_middle) {
          with_rows(x.tiles.rows(t), [&](auto rows) {
            few_bits_tile<decltype(bits)::value, decltype(has_middle)::value, decltype(rows)::value>(
                x.quads_of(t), x.factors_of(t), x.starts_of(t), panel.data, k, sums + p * NR, stride);
          });
        });
      }
      const int64_t at = x.tiles.first(t) * weight.n + first_panel * NR;
      write_rows(sums, stride, x.tiles.rows(t), n_valid, out + at, weight.n);
    }
  });
}

}  // namespace

RoundedRows round_rows(const void* x, bool x_bf16, int64_t m, int64_t k, int threads, const float* dither) {
  const RowTiles tiles(m);
  int32_t* quads = workspace<int32_t, kInputs>(m * (k / 4) * COPIES);
  float* factors = workspace<float, kWidened>(m * (k / GROUP * 2));
  int32_t* starts = workspace<int32_t, kStarts>(m * (k / GROUP * 2));
  if (x_bf16)
    round_tiles(static_cast<const bf16*>(x), tiles, k, dither, quads, factors, starts, threads);
  else
    round_tiles(static_cast<const float*>(x), tiles, k, dither, quads, factors, starts, threads);
  return {tiles, k, quads, factors, starts};
}

void linear_few_bits(const PackedWeight& weight, const void* x, bool x_bf16, int64_t m, void* out,
                     bool out_bf16, int threads) {
  const int64_t row_bytes = weight.k * static_cast<int64_t>(x_bf16 ? sizeof(bf16) : sizeof(float));
  for (int64_t first = 0; first < m; first += MOST_ROWS) {
    const void* from = static_cast<const char*>(x) + first * row_bytes;
    const RoundedRows rows = round_rows(from, x_bf16, std::min(MOST_ROWS, m - first), weight.k, threads);
    if (out_bf16)
      multiply(weight, rows, static_cast<bf16*>(out) + first * weight.n, threads);
    else
      multiply(weight, rows, static_cast<float*>(out) + first * weight.n, threads);
  }
}

}  // namespace gemserve
