// One work item of paged attention: some consecutive queries of one sequence, all heads that share one KV
// head, some splits of the context. See attention.cpp for how the work is cut and why results do not depend
// on it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "parallel.h"
#include "simd.h"

namespace gemserve {

constexpr int64_t SPLIT = 128;  // keys of a split: its scores are normalised together
constexpr int64_t SPAN = 8;     // splits of a span: they are merged in ascending order, then spans are
// Keys that stay in the first-level cache while all rows of an item pass over them.
constexpr int64_t KEY_TILE = 16;
constexpr int64_t AHEAD = KEY_TILE;  // keys between a use and its prefetch
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// Field by field as in model/ops/cpu/records.py: 64-bit fields only.
struct AttentionArguments {
  const void* query;    // [n, num_heads, head_dim]
  const void* k_cache;  // [blocks, block_size, kv_heads, head_dim], first two axes strided
  const void* v_cache;
  void* output;                 // [n, num_heads, head_dim]
  const int32_t* block_table;   // [num_seqs, table_stride]
  const int32_t* query_start;   // [num_seqs + 1]
  const int32_t* context_lens;  // [num_seqs]
  int64_t num_seqs, table_stride, block_size, num_heads, kv_heads, head_dim;
  int64_t k_block_stride, k_slot_stride, v_block_stride, v_slot_stride;  // in elements
  int64_t window;                                                        // 0: none
  int64_t is_bf16, cache_is_bf16, threads;  // bfloat16 queries come with a bfloat16 cache
  double scale;
};
static_assert(sizeof(AttentionArguments) == 22 * 8, "change model/ops/cpu/records.py, too");

struct Item {
  int32_t sequence, kv_head;
  int32_t first_query, num_queries;  // within the sequence's own queries
  int64_t first_split, last_split;   // inclusive
  // Index of its first row among the partial results, or -1: writes the output itself.
  int64_t partial;
  // Of an item that was cut: splits of a piece, which begin at multiples of it.
  int64_t piece;
};

// Running softmax of one row: the largest score, the sum of exponentials over it, and the weighted values,
// unnormalised.
struct RowState {
  float largest, total;
};

// Adds the result of a split or a span to what came before. The only way in which they meet, here and across
// items.
INLINE void merge(RowState& state, float* values, const RowState& split, const float* split_values,
                  int64_t head_dim) {
  if (split.largest == NEVER) return;
  if (state.largest == NEVER) {  // what was there before may never have been written
    state = split;
    std::copy_n(split_values, head_dim, values);
    return;
  }
  const float largest = std::max(state.largest, split.largest);
  const float before = exp(state.largest - largest), now = exp(split.largest - largest);
  state.largest = largest;
  state.total = state.total * before + split.total * now;
  for (int64_t d = 0; d < head_dim; d += W)
    store(values + d, fma(load(values + d), set1(before), mul(load(split_values + d), set1(now))));
}

// Scores of ROWS rows against keys [first, last) of a split. ``places``: where the keys of a split stand, and
// what comes after them.
template <int ROWS, class T>
INLINE void score_keys(const float* query, const T* const* places, int64_t first, int64_t last,
                       int64_t head_dim, float* scores) {
  constexpr int64_t LINE = 64 / sizeof(T), STEP = std::max<int64_t>(LINE, 2 * W);
  int64_t key = first;
  for (; key + 2 <= last; key += 2) {
    const T *one = places[key], *two = places[key + 1], *next_one = places[key + AHEAD],
            *next_two = places[key + AHEAD + 1];
    vf sums[ROWS][2];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = zero();
    const auto multiply = [&](int64_t d) __attribute__((always_inline)) {
      vf a[2], b[2];
      load_two(one + d, a[0], a[1]);
      load_two(two + d, b[0], b[1]);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i)
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
          const vf q = in_register(load(query + r * head_dim + d + i * W));
          sums[r][0] = in_register(fma(q, a[i], sums[r][0]));
          sums[r][1] = in_register(fma(q, b[i], sums[r][1]));
        }
    };
    int64_t d = 0;
    for (; d + STEP <= head_dim; d += STEP) {
#pragma GCC unroll 2
      for (int64_t i = 0; i < STEP; i += LINE) prefetch(next_one + d + i), prefetch(next_two + d + i);
#pragma GCC unroll 2
      for (int64_t i = 0; i < STEP; i += 2 * W) multiply(d + i);
    }
    for (; d < head_dim; d += 2 * W) multiply(d);
    for (int r = 0; r < ROWS; ++r) {
      scores[r * SPLIT + key] = sum_lanes(sums[r][0]);
      scores[r * SPLIT + key + 1] = sum_lanes(sums[r][1]);
    }
  }
  if (key < last) {
    vf sums[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) sums[r] = zero();
    for (int64_t d = 0; d < head_dim; d += 2 * W) {
      vf a[2];
      load_two(places[key] + d, a[0], a[1]);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i)
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) sums[r] = fma(load(query + r * head_dim + d + i * W), a[i], sums[r]);
    }
    for (int r = 0; r < ROWS; ++r) scores[r * SPLIT + key] = sum_lanes(sums[r]);
  }
}

// values[ROWS][head_dim] += weights[ROWS] times the values of keys [first, last). A tile's values are read in
// pieces of 2 W of the head, key after key, but those of the next tile are fetched as they lie in memory, a
// share of them with every piece.
template <int ROWS, class T>
INLINE void add_values(const float* weights, const T* const* places, int64_t first, int64_t last,
                       int64_t head_dim, float* values) {
  constexpr int64_t LINE = 64 / sizeof(T);
  const int64_t share = ceil_div(KEY_TILE * 2 * W, head_dim);
  int64_t fetched = first + AHEAD;
  for (int64_t d = 0; d < head_dim; d += 2 * W) {
    for (const int64_t end = std::min(fetched + share, first + 2 * AHEAD); fetched < end; ++fetched)
      for (int64_t i = 0; i < head_dim; i += LINE) prefetch(places[fetched] + i);
    vf sums[ROWS][2];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) load_two(values + r * head_dim + d, sums[r][0], sums[r][1]);
    for (int64_t key = first; key < last; ++key) {
      vf v[2];
      load_two(places[key] + d, v[0], v[1]);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        const vf weight = in_register(set1(weights[r * SPLIT + key]));
        sums[r][0] = fma(weight, v[0], sums[r][0]);
        sums[r][1] = fma(weight, v[1], sums[r][1]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      store(values + r * head_dim + d, sums[r][0]);
      store(values + r * head_dim + d + W, sums[r][1]);
    }
  }
}

// Turns the scores of keys [first, last) of one row into weights. Other keys that its tile computes,
// [tile_first, tile_last), get weight 0.
INLINE RowState weigh(float* scores, int64_t first, int64_t last, int64_t tile_first, int64_t tile_last) {
  if (first >= last) {
    for (int64_t i = tile_first; i < tile_last; ++i) scores[i] = 0.0f;
    return {NEVER, 0.0f};
  }
  const int64_t begin = first / W * W, end = ceil_div(last, W) * W;
  for (int64_t i = begin; i < first; ++i) scores[i] = NEVER;
  for (int64_t i = last; i < end; ++i) scores[i] = NEVER;
  for (int64_t i = tile_first; i < begin; ++i) scores[i] = 0.0f;
  for (int64_t i = end; i < tile_last; ++i) scores[i] = 0.0f;
  vf largest = set1(NEVER), total = zero();
  for (int64_t i = begin; i < end; i += W) largest = max(largest, load(scores + i));
  const float top = max_lanes(largest);
  for (int64_t i = begin; i < end; i += W) {
    const vf weight = exp(sub(load(scores + i), set1(top)));
    total = add(total, weight);
    store(scores + i, weight);
  }
  const float sum = sum_lanes(total);
  // No score but NaN, which a maximum may drop: not to be taken for a split not seen.
  return {top == NEVER ? sum : top, sum};
}

}  // namespace gemserve
