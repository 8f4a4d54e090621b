// What the kernels that read whole rows of logits share: how rows are cut into pieces, and the weights of
// tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "parallel.h"
#include "simd.h"

namespace gemserve {

constexpr int64_t PIECE = 32768;  // logits of a work item
constexpr int64_t BLOCK = 1024;   // logits that are read twice while they are in the first-level cache
constexpr float NEVER = -std::numeric_limits<float>::infinity();

template <class Body>
void each_piece(int64_t rows, int64_t size, int threads, const Body& body) {
  const int64_t pieces = ceil_div(size, PIECE);
  parallel_for(rows * pieces, threads, 1, [&](int64_t item) {
    const int64_t first = item % pieces * PIECE;
    body(item, item / pieces, first, std::min(size, first + PIECE));
  });
}

INLINE float largest_of(const float* x, int64_t count) {
  vf tops[4] = {set1(NEVER), set1(NEVER), set1(NEVER), set1(NEVER)};
  int64_t i = 0;
  for (; i + 4 * W <= count; i += 4 * W)
    for (int j = 0; j < 4; ++j) tops[j] = max(load(x + i + j * W), tops[j]);
  for (; i + W <= count; i += W) tops[0] = max(load(x + i), tops[0]);
  float top = max_lanes(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
  for (; i < count; ++i) top = std::max(top, x[i]);
  return top;
}

INLINE float reciprocal(float temperature) {
  return std::min(1.0f / temperature, std::numeric_limits<float>::max());
}

// e^((x - top) / temperature), or 0 where that is below the cut.
struct Weigher {
  float top, inverse, cut;
  INLINE vf operator()(vf x) const {
    const vf weight = exp(mul(sub(x, set1(top)), set1(inverse)));
    return zero_where_less(weight, weight, set1(cut));
  }
  INLINE float operator()(float x) const {
    alignas(64) float lanes[W];
    store(lanes, (*this)(set1(x)));
    return lanes[0];
  }
};

INLINE double sum_of(const float* x, int64_t count, const Weigher& weigher) {
  vf sums[2] = {zero(), zero()};
  int64_t i = 0;
  for (; i + 2 * W <= count; i += 2 * W) {
    sums[0] = add(sums[0], weigher(load(x + i)));
    sums[1] = add(sums[1], weigher(load(x + i + W)));
  }
  double total = sum_lanes(add(sums[0], sums[1]));
  for (; i < count; ++i) total += weigher(x[i]);
  return total;
}

struct Candidate {
  float value;
  int32_t id;
  bool operator<(const Candidate& other) const {
    return value != other.value ? value > other.value : id < other.id;
  }
};

}  // namespace gemserve
