// y = x W^T with float32 or bfloat16 weights in panels, float32 sums.
//
// Every output is one chain of fused multiply-adds over k in ascending order, in one lane, starting from
// zero. How many rows share a tile, how many panels run side by side and where the k loop is cut changes
// nothing in that chain (a float32 sum that goes through memory stays what it is), so a row's result never
// depends on its neighbours: bit for bit.
#include <sys/mman.h>

#include "few_bits.h"
#include "kernels.h"

namespace gemserve {
namespace {

// Inputs per pass: a panel's share (bf16 16-32 KiB) and a tile's inputs stay in cache.
constexpr int64_t DEPTH = 512;
// From so many row tiles on, bfloat16 weights are widened once and reused.
constexpr int64_t WIDEN_TILES = 4;

// sums[MR][NP * NR] (+)= a [depth][MR] times NP panels [depth][NR].
template <int MR, int NP, class T>
void tile(const float* a, const T* b, int64_t panel_stride, int64_t depth, float* sums, int64_t stride,
          bool fresh) {
  vf acc[MR][NP][2];
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) acc[r][p][h] = fresh ? zero() : load(sums + r * stride + p * NR + h * W);
  for (int64_t k = 0; k < depth; ++k) {
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p) {
      vf low, high;
      const T* row = b + p * panel_stride + k * NR;
      if (NP > 1 || MR < 4) _mm_prefetch(reinterpret_cast<const char*>(row) + 1024, _MM_HINT_T0);
      load_two(row, low, high);
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
        const vf x = set1(a[k * MR + r]);
        acc[r][p][0] = fma(x, low, acc[r][p][0]);
        acc[r][p][1] = fma(x, high, acc[r][p][1]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) store(sums + r * stride + p * NR + h * W, acc[r][p][h]);
}

template <int MR, class T>
void panels(const float* a, const T* b, int64_t panel_stride, int64_t count, int64_t depth, float* sums,
            int64_t stride, bool fresh) {
  // Side by side, so that enough sums hide the latency.
  constexpr int NP = MR == 1 ? 4 : MR <= MAX_ROWS / 2 ? 2 : 1;
  int64_t p = 0;
  for (; p + NP <= count; p += NP)
    tile<MR, NP>(a, b + p * panel_stride, panel_stride, depth, sums + p * NR, stride, fresh);
  for (; p < count; ++p)
    tile<MR, 1>(a, b + p * panel_stride, panel_stride, depth, sums + p * NR, stride, fresh);
}

template <class T>
void tile_rows(int rows, const float* a, const T* b, int64_t panel_stride, int64_t count, int64_t depth,
               float* sums, int64_t stride, bool fresh) {
  with_rows(rows, [&](auto number) {
    panels<decltype(number)::value>(a, b, panel_stride, count, depth, sums, stride, fresh);
  });
}

// Inputs of every tile as float32 [k][rows], so that a tile reads them in order.
template <class In>
void pack_rows(const In* x, int64_t k, const RowTiles& tiles, float* packed, int threads) {
  parallel_for(tiles.count, tiles.m * k < 65536 ? 1 : threads, 1, [&](int64_t t) {
    const int rows = tiles.rows(t);
    const In* from = x + tiles.first(t) * k;
    float* to = packed + tiles.first(t) * k;
    for (int r = 0; r < rows; ++r)
      for (int64_t i = 0; i < k; ++i) to[i * rows + r] = widen(from[r * k + i]);
  });
}

template <class T, class Out>
void multiply(const PackedWeight& weight, const float* packed, const RowTiles& tiles, Out* out, int threads) {
  const T* data = static_cast<const T*>(weight.data);
  const int64_t k = weight.k, total = num_panels(weight.n), panel_stride = k * NR,
                items = ceil_div(total, PANELS);
  constexpr int64_t stride = PANELS * NR;
  const int64_t chunk = std::max<int64_t>(1, items / (threads * 64));
  parallel_for(items, threads, chunk, [&](int64_t item) {
    const int64_t first_panel = item * PANELS, count = std::min<int64_t>(PANELS, total - first_panel);
    const int64_t n_valid = std::min(count * NR, weight.n - first_panel * NR);
    float* sums = workspace<float, kSums>(std::min(tiles.m, CHUNK_ROWS) * stride);
    for (int64_t first = 0, last; first < tiles.count; first = last) {
      const int64_t first_row = tiles.first(first);
      for (last = first;
           last < tiles.count && tiles.first(last) + tiles.rows(last) - first_row <= CHUNK_ROWS;)
        ++last;
      for (int64_t done = 0; done < k; done += DEPTH) {
        const int64_t depth = std::min(DEPTH, k - done);
        const T* b = data + first_panel * panel_stride + done * NR;
        const bool widened = sizeof(T) == 2 && last - first >= WIDEN_TILES;
        float* wide = widened ? workspace<float, kWidened>(PANELS * DEPTH * NR) : nullptr;
        if (widened)
          for (int64_t p = 0; p < count; ++p)
            for (int64_t i = 0; i < depth; ++i) {
              vf low, high;
              load_two(b + p * panel_stride + i * NR, low, high);
              store(wide + (p * depth + i) * NR, low);
              store(wide + (p * depth + i) * NR + W, high);
            }
        for (int64_t t = first; t < last; ++t) {
          const int rows = tiles.rows(t);
          const float* a = packed + tiles.first(t) * k + done * rows;
          float* tile_sums = sums + (tiles.first(t) - first_row) * stride;
          if (widened)
            tile_rows(rows, a, wide, depth * NR, count, depth, tile_sums, stride, done == 0);
          else
            tile_rows(rows, a, b, panel_stride, count, depth, tile_sums, stride, done == 0);
        }
      }
      const int64_t rows = tiles.first(last) - first_row;
      write_rows(sums, stride, rows, n_valid, out + first_row * weight.n + first_panel * NR, weight.n);
    }
  });
}

template <class T>
void multiply_to(const PackedWeight& weight, const float* packed, const RowTiles& tiles, void* out,
                 bool out_bf16, int threads) {
  if (out_bf16)
    multiply<T>(weight, packed, tiles, static_cast<bf16*>(out), threads);
  else
    multiply<T>(weight, packed, tiles, static_cast<float*>(out), threads);
}

INLINE void to_weight(float x, float* to) { *to = x; }
INLINE void to_weight(float x, bf16* to) { narrow(x, to); }

template <class T, class In>
void pack_panels(const PackedWeight& weight, const In* source, int threads) {
  const int64_t n = weight.n, k = weight.k;
  parallel_for(num_panels(n), threads, 1, [&](int64_t p) {
    T* panel = static_cast<T*>(weight.data) + p * k * NR;
    for (int j = 0; j < NR; ++j) {
      const int64_t feature = p * NR + j;
      const int place = sizeof(T) == 4 ? j : j < W ? 2 * j : 2 * (j - W) + 1;
      for (int64_t i = 0; i < k; ++i)
        to_weight(feature < n ? widen(source[feature * k + i]) : 0.0f, panel + i * NR + place);
    }
  });
}

}  // namespace
}  // namespace gemserve

using namespace gemserve;

extern "C" {

int32_t vector_width() { return W; }

// Elements (of the weight's own type) that the packed form of a weight [n, k] takes.
int64_t packed_elements(int64_t n, int64_t k) { return num_panels(n) * NR * k; }

void advise_huge_pages(void* data, int64_t bytes) {
  constexpr uintptr_t page = 2 << 20;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  // Advice only: failure is harmless.
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

void pack_linear(const PackedWeight* weight, const void* source, int32_t source_bf16, int32_t threads) {
  const bf16* narrow_source = static_cast<const bf16*>(source);
  const float* wide_source = static_cast<const float*>(source);
  if (weight->kind == kInt8)
    pack_int8(*weight, source, source_bf16, threads);
  else if (weight->kind == kFewBits)
    pack_few_bits(*weight, source, source_bf16, threads);
  else if (weight->kind == kFloat32)
    source_bf16 ? pack_panels<float>(*weight, narrow_source, threads)
                : pack_panels<float>(*weight, wide_source, threads);
  else
    source_bf16 ? pack_panels<bf16>(*weight, narrow_source, threads)
                : pack_panels<bf16>(*weight, wide_source, threads);
}

void linear(const PackedWeight* weight, const void* x, int32_t x_bf16, int64_t m, void* out, int32_t out_bf16,
            int32_t threads) {
  if (m == 0) return;
  if (weight->kind == kInt8) return linear_int8(*weight, x, x_bf16, m, out, out_bf16, threads);
  if (weight->kind == kFewBits) return linear_few_bits(*weight, x, x_bf16, m, out, out_bf16, threads);
  const RowTiles tiles(m);
  float* packed = workspace<float, kInputs>(m * weight->k);
  if (x_bf16)
    pack_rows(static_cast<const bf16*>(x), weight->k, tiles, packed, threads);
  else
    pack_rows(static_cast<const float*>(x), weight->k, tiles, packed, threads);
  if (weight->kind == kFloat32)
    multiply_to<float>(*weight, packed, tiles, out, out_bf16, threads);
  else
    multiply_to<bf16>(*weight, packed, tiles, out, out_bf16, threads);
}

}  // extern "C"
