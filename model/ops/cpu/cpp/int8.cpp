// y = x W^T with int8 weights that share a float16 scale per output feature and group of inputs (as GGUF's
// Q8_0 does with groups of 32, which is kept exactly), and activations rounded to 16 bits per row.
//
// A panel holds [k / 2][2][W][2] int8: for a pair of inputs, W features and then the W next, each with both
// its weights. A panel's scales are [k / group][NR]. Products and sums within a group are exact int32 (127 *
// 32767 * group must stay below 2^31), and groups are added in ascending order in float32, so a row's result
// never depends on its neighbours.
#include <cmath>

#include "linear.h"

namespace gemserve {
namespace {

constexpr int64_t PAIR_BYTES = 2 * NR;  // of a pair of inputs for NR features

// sums[MR][NP * NR] = x [k / 2][MR] (pairs of int16) times NP panels, not yet scaled by the rows' own scales.
template <int MR, int NP>
void tile(const int32_t* x, const int8_t* b, const half* scales, int64_t k, int64_t group, float* sums,
          int64_t stride) {
  const int64_t panel_stride = k / 2 * PAIR_BYTES, scale_stride = k / group * NR;
  for (int r = 0; r < MR; ++r)
    for (int j = 0; j < NP * NR; j += W) store(sums + r * stride + j, zero());
  for (int64_t first = 0; first < k; first += group, scales += NR) {
    vi acc[MR][NP][2];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < NP; ++p) acc[r][p][0] = acc[r][p][1] = set1i(0);
    for (int64_t pair = first / 2; pair < (first + group) / 2; ++pair) {
#pragma GCC unroll 4
      for (int p = 0; p < NP; ++p) {
        const int8_t* row = b + p * panel_stride + pair * PAIR_BYTES;
        if (NP > 1 || MR < 4) _mm_prefetch(reinterpret_cast<const char*>(row) + 1024, _MM_HINT_T0);
        const vi low = load_int8_as_int16(row), high = load_int8_as_int16(row + NR);
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
          const vi inputs = set1i(x[pair * MR + r]);
          acc[r][p][0] = pair_dot(acc[r][p][0], inputs, low);
          acc[r][p][1] = pair_dot(acc[r][p][1], inputs, high);
        }
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const vf scale = load_half(scales + p * scale_stride + h * W);
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
          float* to = sums + r * stride + p * NR + h * W;
          store(to, fma(to_float(acc[r][p][h]), scale, load(to)));
        }
      }
  }
}

template <int MR>
void panels(const int32_t* x, const int8_t* b, const half* scales, int64_t count, int64_t k, int64_t group,
            float* sums, int64_t stride) {
  constexpr int NP = MR == 1 ? 4 : MR <= MAX_ROWS / 2 ? 2 : 1;
  const int64_t panel_stride = k / 2 * PAIR_BYTES, scale_stride = k / group * NR;
  int64_t p = 0;
  for (; p + NP <= count; p += NP)
    tile<MR, NP>(x, b + p * panel_stride, scales + p * scale_stride, k, group, sums + p * NR, stride);
  for (; p < count; ++p)
    tile<MR, 1>(x, b + p * panel_stride, scales + p * scale_stride, k, group, sums + p * NR, stride);
}

// Rounds rows to 16 bits, interleaved per tile as [k / 2][rows] pairs. A row that is not finite gets the
// scale NaN.
template <class In>
void quantise_rows(const In* x, int64_t k, const RowTiles& tiles, int32_t* packed, float* row_scales,
                   int threads) {
  parallel_for(tiles.count, tiles.m * k < 65536 ? 1 : threads, 1, [&](int64_t t) {
    const int rows = tiles.rows(t);
    for (int r = 0; r < rows; ++r) {
      const In* from = x + (tiles.first(t) + r) * k;
      int16_t* to = reinterpret_cast<int16_t*>(packed + tiles.first(t) * (k / 2)) + 2 * r;
      const auto [top, finite] = extent_of(from, k);
      row_scales[tiles.first(t) + r] = finite ? top / 32767.0f : NAN;
      const vf inverse = set1(finite && top > SMALLEST ? 32767.0f / top : 0.0f);
      alignas(64) int32_t lanes[W];
      for (int64_t i = 0; i < k; i += W) {
        const vf scaled = max(set1(-32767.0f), min(set1(32767.0f), mul(load(from + i), inverse)));
        store(reinterpret_cast<float*>(lanes), as_float(to_int(scaled)));
        for (int j = 0; j < W; ++j)
          to[((i + j) / 2) * 2 * rows + ((i + j) & 1)] = static_cast<int16_t>(lanes[j]);
      }
    }
  });
}

template <class Out>
void multiply(const PackedWeight& weight, const int32_t* packed, const float* row_scales,
              const RowTiles& tiles, Out* out, int threads) {
  const int64_t k = weight.k, total = num_panels(weight.n), items = ceil_div(total, PANELS);
  constexpr int64_t stride = PANELS * NR;
  const int64_t chunk = std::max<int64_t>(1, items / (threads * 64));
  parallel_for(items, threads, chunk, [&](int64_t item) {
    const int64_t first_panel = item * PANELS, count = std::min<int64_t>(PANELS, total - first_panel);
    const int64_t n_valid = std::min(count * NR, weight.n - first_panel * NR);
    const int8_t* b = static_cast<const int8_t*>(weight.data) + first_panel * (k / 2) * PAIR_BYTES;
    const half* scales = static_cast<const half*>(weight.scales) + first_panel * (k / weight.group) * NR;
    float* sums = workspace<float, kSums>(MAX_ROWS * stride);
    for (int64_t t = 0; t < tiles.count; ++t) {
      const int rows = tiles.rows(t);
      const int64_t first_row = tiles.first(t);
      with_rows(rows, [&](auto number) {
        panels<decltype(number)::value>(packed + first_row * (k / 2), b, scales, count, k, weight.group, sums,
                                        stride);
      });
      for (int r = 0; r < rows; ++r)
        for (int64_t j = 0; j < stride; j += W)
          store(sums + r * stride + j, mul(load(sums + r * stride + j), set1(row_scales[first_row + r])));
      write_rows(sums, stride, rows, n_valid, out + first_row * weight.n + first_panel * NR, weight.n);
    }
  });
}

template <class In>
void pack(const PackedWeight& weight, const In* source, int threads) {
  const int64_t n = weight.n, k = weight.k, group = weight.group;
  parallel_for(num_panels(n), threads, 1, [&](int64_t p) {
    int8_t* panel = static_cast<int8_t*>(weight.data) + p * (k / 2) * PAIR_BYTES;
    half* scales = static_cast<half*>(weight.scales) + p * (k / group) * NR;
    std::memset(panel, 0, k / 2 * PAIR_BYTES);
    std::memset(scales, 0, (k / group) * NR * sizeof(half));
    for (int j = 0; j < NR && p * NR + j < n; ++j)
      for (int64_t first = 0; first < k; first += group) {
        const In* from = source + (p * NR + j) * k + first;
        float largest = 0.0f, poison = 0.0f;  // x * 0 is NaN for a value that is not finite
        for (int64_t i = 0; i < group; ++i) {
          largest = std::max(largest, std::fabs(widen(from[i])));
          poison += widen(from[i]) * 0.0f;
        }
        const half scale = static_cast<half>(_cvtss_sh(largest / 127 + poison, _MM_FROUND_TO_NEAREST_INT));
        const float step = _cvtsh_ss(scale);
        scales[first / group * NR + j] = scale;
        for (int64_t i = 0; i < group; ++i) {
          const float steps = step != 0.0f ? std::nearbyint(widen(from[i]) / step) : 0.0f;
          const float value = std::max(-127.0f, std::min(127.0f, steps));
          panel[(first + i) / 2 * PAIR_BYTES + j / W * NR + j % W * 2 + (i & 1)] = static_cast<int8_t>(value);
        }
      }
  });
}

}  // namespace

void linear_int8(const PackedWeight& weight, const void* x, bool x_bf16, int64_t m, void* out, bool out_bf16,
                 int threads) {
  const RowTiles tiles(m);
  int32_t* packed = workspace<int32_t, kInputs>(m * (weight.k / 2));
  float* row_scales = workspace<float, kWidened>(m);
  if (x_bf16)
    quantise_rows(static_cast<const bf16*>(x), weight.k, tiles, packed, row_scales, threads);
  else
    quantise_rows(static_cast<const float*>(x), weight.k, tiles, packed, row_scales, threads);
  if (out_bf16)
    multiply(weight, packed, row_scales, tiles, static_cast<bf16*>(out), threads);
  else
    multiply(weight, packed, row_scales, tiles, static_cast<float*>(out), threads);
}

void round_rows_to_int16(const void* x, bool x_bf16, int64_t m, int64_t k, int32_t* pairs, float* row_scales,
                         int threads) {
  parallel_for(m, m * k < 65536 ? 1 : threads, 1, [&](int64_t row) {
    if (x_bf16)
      quantise_rows(static_cast<const bf16*>(x) + row * k, k, RowTiles(1), pairs + row * (k / 2),
                    row_scales + row, 1);
    else
      quantise_rows(static_cast<const float*>(x) + row * k, k, RowTiles(1), pairs + row * (k / 2),
                    row_scales + row, 1);
  });
}

void int8_panel(const PackedWeight& weight, int64_t panel, const int32_t* pairs, float row_scale,
                float* out) {
  const int8_t* b = static_cast<const int8_t*>(weight.data) + panel * (weight.k / 2) * PAIR_BYTES;
  const half* scales = static_cast<const half*>(weight.scales) + panel * (weight.k / weight.group) * NR;
  tile<1, 1>(pairs, b, scales, weight.k, weight.group, out, NR);
  for (int64_t j = 0; j < NR; j += W) store(out + j, mul(load(out + j), set1(row_scale)));
}

void int8_group(const PackedWeight& weight, int64_t feature, int64_t group, float* values) {
  const int64_t panel = feature / NR, j = feature % NR, first = group * weight.group;
  const int8_t* from = static_cast<const int8_t*>(weight.data) + panel * (weight.k / 2) * PAIR_BYTES;
  const float step = _cvtsh_ss(
      static_cast<const half*>(weight.scales)[(panel * (weight.k / weight.group) + group) * NR + j]);
  for (int64_t i = 0; i < weight.group; ++i)
    values[i] = step * from[(first + i) / 2 * PAIR_BYTES + j / W * NR + j % W * 2 + (i & 1)];
}

void pack_int8(const PackedWeight& weight, const void* source, bool source_bf16, int threads) {
  if (source_bf16)
    pack(weight, static_cast<const bf16*>(source), threads);
  else
    pack(weight, static_cast<const float*>(source), threads);
}

}  // namespace gemserve
