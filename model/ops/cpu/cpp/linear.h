// What the linear kernels share: how a weight is kept, and how the rows of a batch are cut into tiles.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "parallel.h"
#include "simd.h"

namespace gemserve {

enum Kind : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kFewBits = 3 };

using half = uint16_t;  // float16 bits

// A weight [n, k], kept in panels of NR output features: panel p holds [k][NR] values, zeros beyond n.
// bfloat16 panels interleave feature j and feature j + W in one 32-bit lane, so that a shift and a mask widen
// them. int8.cpp and few_bits.h describe the other forms.
struct PackedWeight {
  void* data;
  void* scales;  // int8 only: float16
  int64_t n, k;
  int64_t group;  // int8 and few bits only: consecutive inputs that share a scale
  int32_t kind;
};
static_assert(sizeof(PackedWeight) == 6 * 8, "change model/ops/cpu/records.py, too");

constexpr int NR = 2 * W;  // output features of a panel
constexpr int PANELS = 4;  // panels of one work item
// Rows of a register tile: 2 * rows accumulators, 2 weights, 1 input.
constexpr int MAX_ROWS = W == 8 ? 6 : 12;
// Rows whose sums are kept at once: 240 x PANELS x NR floats stay in cache.
constexpr int64_t CHUNK_ROWS = 240;

// Inputs of which none is above it are rounded to zeros: the inverse of their step must be finite.
constexpr float SMALLEST = 1e-30f;

inline int64_t num_panels(int64_t n) { return ceil_div(n, NR); }

// Rows [0, m) cut into tiles of nearly equal size, none above MAX_ROWS.
struct RowTiles {
  int64_t m, count, base, larger;
  explicit RowTiles(int64_t rows) : m(rows), count(ceil_div(rows, MAX_ROWS)) {
    base = count ? m / count : 0;
    larger = count ? m % count : 0;  // the first so many tiles have one row more
  }
  int64_t first(int64_t tile) const { return tile * base + std::min(tile, larger); }
  int rows(int64_t tile) const { return static_cast<int>(base + (tile < larger)); }
};

// Calls body(std::integral_constant<int, rows>) for 1 to MAX_ROWS rows.
template <class Body>
INLINE void with_rows(int rows, const Body& body) {
#define CASE(MR)                                                           \
  case MR:                                                                 \
    if constexpr (MR <= MAX_ROWS) body(std::integral_constant<int, MR>()); \
    break;
  switch (rows) {
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
  }
#undef CASE
}

// The largest absolute value of some inputs, whose number is a multiple of W, and whether all of them are
// finite.
struct Extent {
  float largest;
  bool finite;
};
template <class In>
INLINE Extent extent_of(const In* x, int64_t count) {
  vf largest = zero(), poison = zero();  // x * 0 is NaN for a value that is not finite
  for (int64_t i = 0; i < count; i += W) {
    const vf v = load(x + i);
    largest = max(largest, max(v, sub(zero(), v)));
    poison = fma(v, zero(), poison);
  }
  return {max_lanes(largest), std::isfinite(sum_lanes(poison))};
}

// Memory that lasts from call to call on one thread, aligned to a cache line; contents are not kept. Users
// that are alive at the same time on one thread name different purposes.
enum Purpose { kInputs, kSums, kWidened, kStarts, kBounds, kExact, kPartial };
template <class T, Purpose purpose>
T* workspace(int64_t count) {
  struct alignas(64) Line {
    char bytes[64];
  };
  struct Buffer {
    std::unique_ptr<Line[]> lines;
    int64_t size = 0;
  };
  thread_local Buffer buffer;
  const int64_t size = ceil_div(count * static_cast<int64_t>(sizeof(T)), 64);
  if (buffer.size < size) {
    buffer.lines.reset();
    buffer.lines.reset(new Line[size]);
    buffer.size = size;
  }
  return reinterpret_cast<T*>(buffer.lines.get());
}

// Sums [rows][stride] to rows of the output, n_valid features each.
template <class Out>
inline void write_rows(const float* sums, int64_t stride, int64_t rows, int64_t n_valid, Out* out,
                       int64_t out_stride) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = sums + r * stride;
    Out* to = out + r * out_stride;
    int64_t j = 0;
    for (; j + W <= n_valid; j += W) store(to + j, load(from + j));
    for (; j < n_valid; ++j) narrow(from[j], to + j);
  }
}

void linear_int8(const PackedWeight& weight, const void* x, bool x_bf16, int64_t m, void* out, bool out_bf16,
                 int threads);
void pack_int8(const PackedWeight& weight, const void* source, bool source_bf16, int threads);
// Rows as linear_int8 rounds them, each [k / 2] pairs of int16 and a scale, and one panel of its product with
// one of them, [NR].
void round_rows_to_int16(const void* x, bool x_bf16, int64_t m, int64_t k, int32_t* pairs, float* row_scales,
                         int threads);
void int8_panel(const PackedWeight& weight, int64_t panel, const int32_t* pairs, float row_scale, float* out);
// The values of a feature's group, as they are stored; zeros beyond the last feature.
void int8_group(const PackedWeight& weight, int64_t feature, int64_t group, float* values);

}  // namespace gemserve
