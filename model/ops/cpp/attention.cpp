// Causal attention over the paged cache, with an optional window: prefill chunks and decodes alike.
//
// The context is cut into splits at fixed positions (multiples of SPLIT), and a row's result is the ordered merge of its splits.
// Within a split every score is one chain over the head, every weighted sum one chain over the keys, and a key that a row does not
// see has weight 0, which leaves a chain as it is. So a row's result is the same bits whichever rows share its item, whether one
// item covers all splits or each its own, and on any number of threads. Only slots that some row of the item sees are read.
#include "kernels.h"

#include <vector>

namespace gemserve {
namespace {

constexpr int64_t ROW_TILE = 4;
constexpr int64_t QUERY_TILE = 16, SMALL_QUERY_TILE = 4;

struct Scratch {
  std::vector<float> query, scores, split_values, values;
  std::vector<RowState> states, split_states;
  int64_t k_offsets[SPLIT + AHEAD + 1] = {}, v_offsets[SPLIT + AHEAD + 1] = {};
};

class Attention {
 public:
  explicit Attention(const AttentionArguments& arguments)
      : a(arguments), group(a.num_heads / a.kv_heads), threads(static_cast<int>(a.threads)) {}

  template <class Activation, class Cache>
  void run() {
    plan();
    partial_values.resize(num_partial * a.head_dim);
    partial_states.resize(num_partial);
    const auto run_one = [&](int64_t i) { run_item<Activation, Cache>(items[i]); };
    parallel_for(static_cast<int64_t>(items.size()), worth_sharing() ? threads : 1, 1, run_one);
    if (num_partial) parallel_for(static_cast<int64_t>(heads.size()), 1, 1, [&](int64_t i) { merge_item<Activation>(heads[i]); });
  }

 private:
  const AttentionArguments& a;
  const int64_t group;
  const int threads;
  std::vector<Item> items;
  std::vector<Item> heads;  // items whose splits are run apart: what to merge
  int64_t num_partial = 0, work = 0;
  std::vector<float> partial_values;
  std::vector<RowState> partial_states;

  int64_t start(int64_t sequence) const {  // position of the sequence's first query
    return a.context_lens[sequence] - (a.query_start[sequence + 1] - a.query_start[sequence]);
  }
  int64_t first_visible(int64_t position) const { return a.window ? std::max<int64_t>(0, position - a.window + 1) : 0; }
  bool worth_sharing() const { return work > 1 << 16; }

  void plan() {
    const int64_t total_queries = a.query_start[a.num_seqs];
    const bool plenty = total_queries * a.kv_heads >= 4 * threads * QUERY_TILE;
    const int64_t query_tile = plenty ? QUERY_TILE : SMALL_QUERY_TILE;
    for (int32_t s = 0; s < a.num_seqs; ++s) {
      const int32_t queries = a.query_start[s + 1] - a.query_start[s];
      for (int32_t q = 0; q < queries; q += query_tile)
        for (int32_t h = 0; h < a.kv_heads; ++h) {
          const int32_t count = std::min<int32_t>(query_tile, queries - q);
          const int64_t low = first_visible(start(s) + q), high = start(s) + q + count;
          items.push_back({s, h, q, count, low / SPLIT, (high - 1) / SPLIT, -1});
          work += (high - low) * count * group * a.head_dim;
        }
    }
    if (plenty || static_cast<int64_t>(items.size()) >= 4 * threads || threads == 1) return;
    std::vector<Item> whole;
    whole.swap(items);
    for (const Item& item : whole) {
      if (item.first_split == item.last_split) {
        items.push_back(item);
        continue;
      }
      heads.push_back(item);
      heads.back().partial = num_partial;
      for (int64_t split = item.first_split; split <= item.last_split; ++split) {
        Item piece = item;
        piece.first_split = piece.last_split = split;
        piece.partial = num_partial;
        items.push_back(piece);
        num_partial += item.num_queries * group;  // rows
      }
    }
  }

  // Where keys [low, high) of a split stand in a cache, relative to its start.
  void locate(const Item& item, int64_t split, int64_t low, int64_t high, int64_t block_stride, int64_t slot_stride,
              int64_t* offsets) const {
    const int32_t* table = a.block_table + item.sequence * a.table_stride;
    for (int64_t position = low; position < high;) {
      const int64_t block = position / a.block_size, end = std::min(high, (block + 1) * a.block_size);
      int64_t offset = table[block] * block_stride + (position - block * a.block_size) * slot_stride + item.kv_head * a.head_dim;
      for (; position < end; ++position, offset += slot_stride) offsets[position - split * SPLIT] = offset;
    }
  }

  template <class T>
  const T* query_row(const Item& item, int64_t row) const {
    const int64_t token = a.query_start[item.sequence] + item.first_query + row / group;
    return static_cast<const T*>(a.query) + (token * a.num_heads + item.kv_head * group + row % group) * a.head_dim;
  }

  template <class Activation, class Cache>
  void run_item(const Item& item) {
    thread_local Scratch own;
    Scratch* address = &own;
    asm("" : "+r"(address));  // else the inner loops look the thread's own address up again and again
    Scratch& scratch = *address;
    const int64_t rows = item.num_queries * group, padded = ceil_div(rows, ROW_TILE) * ROW_TILE;
    scratch.query.resize(padded * a.head_dim);
    scratch.split_values.resize(padded * a.head_dim);
    scratch.values.assign(padded * a.head_dim, 0.0f);
    scratch.scores.resize(padded * SPLIT);
    scratch.states.assign(padded, {NEVER, 0.0f});
    scratch.split_states.resize(padded);
    for (int64_t r = 0; r < rows; ++r) {
      const Activation* from = query_row<Activation>(item, r);
      float* to = scratch.query.data() + r * a.head_dim;
      for (int64_t d = 0; d < a.head_dim; d += W) store(to + d, mul(load(from + d), set1(static_cast<float>(a.scale))));
    }
    for (int64_t split = item.first_split; split <= item.last_split; ++split) run_split<Cache>(item, split, rows, scratch);
    if (item.partial >= 0) {
      std::copy_n(scratch.values.begin(), rows * a.head_dim, partial_values.begin() + item.partial * a.head_dim);
      std::copy_n(scratch.states.begin(), rows, partial_states.begin() + item.partial);
    } else {
      finish<Activation>(item, rows, scratch.values.data(), scratch.states.data());
    }
  }

  // Keys of a split, counted from its start, that rows [row, row + count) of an item see between them.
  struct Range {
    int64_t first, last;
  };
  Range visible(const Item& item, int64_t split, int64_t row, int64_t count) const {
    const int64_t position = start(item.sequence) + item.first_query;
    const int64_t low = first_visible(position + row / group), high = position + (row + count - 1) / group + 1;
    const int64_t first = std::max<int64_t>(0, low - split * SPLIT), last = std::min(SPLIT, high - split * SPLIT);
    return {first, std::max(first, last)};
  }

  template <class T>
  void run_split(const Item& item, int64_t split, int64_t rows, Scratch& scratch) {
    const Range all = visible(item, split, 0, rows);
    locate(item, split, split * SPLIT + all.first, split * SPLIT + all.last, a.k_block_stride, a.k_slot_stride, scratch.k_offsets);
    locate(item, split, split * SPLIT + all.first, split * SPLIT + all.last, a.v_block_stride, a.v_slot_stride, scratch.v_offsets);
    const auto each_tile = [&](const auto& body) {  // key tile by key tile, so that a tile's keys are read once
      for (int64_t key = all.first / KEY_TILE * KEY_TILE; key < all.last; key += KEY_TILE)
        for (int64_t row = 0; row < rows; row += ROW_TILE) {
          const int64_t count = std::min(ROW_TILE, rows - row);
          const Range range = visible(item, split, row, count);
          const int64_t first = std::max(key, range.first), last = std::min(key + KEY_TILE, range.last);
          if (first < last) body(row, count, first, last);
        }
    };
    const T *keys = static_cast<const T*>(a.k_cache), *cached_values = static_cast<const T*>(a.v_cache);
    each_tile([&](int64_t row, int64_t count, int64_t first, int64_t last) {
      const float* query = scratch.query.data() + row * a.head_dim;
      float* scores = scratch.scores.data() + row * SPLIT;
      switch (count) {
        case 1: return score_keys<1>(query, keys, scratch.k_offsets, first, last, a.head_dim, scores);
        case 2: return score_keys<2>(query, keys, scratch.k_offsets, first, last, a.head_dim, scores);
        case 3: return score_keys<3>(query, keys, scratch.k_offsets, first, last, a.head_dim, scores);
        default: return score_keys<4>(query, keys, scratch.k_offsets, first, last, a.head_dim, scores);
      }
    });
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t tile = r / ROW_TILE * ROW_TILE;
      const Range own = visible(item, split, r, 1), touched = visible(item, split, tile, std::min(ROW_TILE, rows - tile));
      scratch.split_states[r] = weigh(scratch.scores.data() + r * SPLIT, own.first, own.last, touched.first, touched.last);
    }
    std::fill_n(scratch.split_values.begin(), rows * a.head_dim, 0.0f);
    each_tile([&](int64_t row, int64_t count, int64_t first, int64_t last) {
      const float* weights = scratch.scores.data() + row * SPLIT;
      float* values = scratch.split_values.data() + row * a.head_dim;
      switch (count) {
        case 1: return add_values<1>(weights, cached_values, scratch.v_offsets, first, last, a.head_dim, values);
        case 2: return add_values<2>(weights, cached_values, scratch.v_offsets, first, last, a.head_dim, values);
        case 3: return add_values<3>(weights, cached_values, scratch.v_offsets, first, last, a.head_dim, values);
        default: return add_values<4>(weights, cached_values, scratch.v_offsets, first, last, a.head_dim, values);
      }
    });
    for (int64_t r = 0; r < rows; ++r)
      merge(scratch.states[r], &scratch.values[r * a.head_dim], scratch.split_states[r], &scratch.split_values[r * a.head_dim],
            a.head_dim);
  }

  template <class T>
  void finish(const Item& item, int64_t rows, const float* values, const RowState* states) {
    for (int64_t r = 0; r < rows; ++r) {
      T* to = static_cast<T*>(a.output) + (query_row<T>(item, r) - static_cast<const T*>(a.query));
      const vf total = set1(states[r].total);
      for (int64_t d = 0; d < a.head_dim; d += W) store(to + d, div(load(values + r * a.head_dim + d), total));
    }
  }

  template <class T>
  void merge_item(const Item& item) {
    const int64_t rows = item.num_queries * group, stride = rows * a.head_dim;
    std::vector<float> values(stride, 0.0f);
    std::vector<RowState> states(rows, {NEVER, 0.0f});
    for (int64_t split = 0; split <= item.last_split - item.first_split; ++split)
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t from = item.partial + split * rows + r;
        merge(states[r], &values[r * a.head_dim], partial_states[from], &partial_values[from * a.head_dim], a.head_dim);
      }
    finish<T>(item, rows, values.data(), states.data());
  }
};

}  // namespace
}  // namespace gemserve

extern "C" void paged_attention(const gemserve::AttentionArguments* arguments) {
  gemserve::Attention attention(*arguments);
  if (arguments->is_bf16)
    attention.run<gemserve::bf16, gemserve::bf16>();
  else if (arguments->cache_is_bf16)
    attention.run<float, gemserve::bf16>();
  else
    attention.run<float, float>();
}
