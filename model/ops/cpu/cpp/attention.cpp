// Causal attention over the paged cache, with an optional window: prefill chunks and decodes alike.
//
// The context is cut into splits at fixed positions (multiples of SPLIT) and these are put together to spans;
// a row's result is the ordered merge of its spans, each the ordered merge of its splits. Within a split
// every score is one chain over the head, every weighted sum one chain over the keys, and a key that a row
// does not see has weight 0, which leaves a chain as it is. So a row's result is the same bits whichever rows
// share its item, whether one item covers all splits or each its own, or each a span, and on any number of
// threads. Only slots that some row of the item sees are read.
#include "kernels.h"

#include <vector>

namespace gemserve {
namespace {

constexpr int64_t ROW_TILE = 4;
constexpr int64_t QUERY_TILE = 16, SMALL_QUERY_TILE = 4;

// The splits of some rows, merged one after the other. A span alone is that span, to the bit, so whole spans
// may be added, too.
class Merged {
 public:
  void start(int64_t rows, int64_t head_dim) {
    size = head_dim;
    for (auto* level : {&span, &all}) {
      level->values.resize(rows * head_dim);
      level->states.assign(rows, {NEVER, 0.0f});
    }
  }
  void add(const RowState* states, const float* values) { add_to(span, states, values); }
  void end_span() {
    add_to(all, span.states.data(), span.values.data());
    std::fill(span.states.begin(), span.states.end(), RowState{NEVER, 0.0f});
  }
  const RowState* states() const { return all.states.data(); }
  float* values() { return all.values.data(); }

 private:
  struct Level {
    std::vector<float> values;
    std::vector<RowState> states;
  };
  int64_t size = 0;
  Level span, all;

  void add_to(Level& level, const RowState* states, const float* values) {
    for (size_t r = 0; r < level.states.size(); ++r)
      merge(level.states[r], &level.values[r * size], states[r], values + r * size, size);
  }
};

struct Scratch {
  std::vector<float> query, scores, split_values;
  std::vector<RowState> split_states;
  Merged merged;
};

class Attention {
 public:
  explicit Attention(const AttentionArguments& arguments)
      : a(arguments), group(a.num_heads / a.kv_heads), threads(static_cast<int>(a.threads)) {}

  template <class Activation, class Cache>
  void run() {
    plan();
    partial_values = workspace<float, kPartial>(num_partial * a.head_dim);
    partial_states = workspace<RowState, kPartial>(num_partial);
    const auto run_one = [&](int64_t i) { run_item<Activation, Cache>(items[i]); };
    parallel_for(static_cast<int64_t>(items.size()), worth_sharing() ? threads : 1, 1, run_one);
    for (const Item& head : heads) merge_item<Activation, Cache>(head);
  }

 private:
  const AttentionArguments& a;
  const int64_t group;
  const int threads;
  std::vector<Item> items;
  std::vector<Item> heads;  // items whose splits are run apart: what to merge
  int64_t num_partial = 0, work = 0;
  float* partial_values = nullptr;
  RowState* partial_states = nullptr;

  int64_t start(int64_t sequence) const {  // position of the sequence's first query
    return a.context_lens[sequence] - (a.query_start[sequence + 1] - a.query_start[sequence]);
  }
  int64_t first_visible(int64_t position) const {
    return a.window ? std::max<int64_t>(0, position - a.window + 1) : 0;
  }
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
          items.push_back({s, h, q, count, low / SPLIT, (high - 1) / SPLIT, -1, 0});
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
      // Splits are cut apart, or spans of them where there are enough.
      const int64_t spans = item.last_split / SPAN - item.first_split / SPAN + 1;
      Item piece = item;
      piece.piece = spans * static_cast<int64_t>(whole.size()) >= 4 * threads ? SPAN : 1;
      heads.push_back(piece);
      heads.back().partial = num_partial;
      for (int64_t split = item.first_split; split <= item.last_split; split = piece.last_split + 1) {
        piece.first_split = split;
        piece.last_split = end_of_piece(heads.back(), split);
        piece.partial = num_partial;
        items.push_back(piece);
        num_partial += item.num_queries * group;  // rows
      }
    }
  }

  static int64_t end_of_piece(const Item& item, int64_t split) {
    return std::min(item.last_split, (split / item.piece + 1) * item.piece - 1);
  }

  // Where keys [low, high) of the context stand in a cache.
  template <class T>
  void locate(const Item& item, const void* cache, int64_t low, int64_t high, int64_t block_stride,
              int64_t slot_stride, const T** places) const {
    const int32_t* table = a.block_table + item.sequence * a.table_stride;
    for (int64_t position = low; position < high;) {
      const int64_t block = position / a.block_size, end = std::min(high, (block + 1) * a.block_size);
      const T* place = static_cast<const T*>(cache) + table[block] * block_stride +
                       (position - block * a.block_size) * slot_stride + item.kv_head * a.head_dim;
      for (; position < end; ++position, place += slot_stride) *places++ = place;
    }
  }

  template <class T>
  const T* query_row(const Item& item, int64_t row) const {
    const int64_t token = a.query_start[item.sequence] + item.first_query + row / group;
    return static_cast<const T*>(a.query) +
           (token * a.num_heads + item.kv_head * group + row % group) * a.head_dim;
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
    scratch.scores.resize(padded * SPLIT);
    scratch.split_states.resize(padded);
    scratch.merged.start(rows, a.head_dim);
    for (int64_t r = 0; r < rows; ++r) {
      const Activation* from = query_row<Activation>(item, r);
      float* to = scratch.query.data() + r * a.head_dim;
      for (int64_t d = 0; d < a.head_dim; d += W)
        store(to + d, mul(load(from + d), set1(static_cast<float>(a.scale))));
      in_cache_order(to, a.head_dim, static_cast<const Cache*>(a.k_cache));
    }
    for (int64_t split = item.first_split; split <= item.last_split; ++split) {
      run_split<Cache>(item, split, rows, scratch);
      scratch.merged.add(scratch.split_states.data(), scratch.split_values.data());
      if (split % SPAN == SPAN - 1 || split == item.last_split) scratch.merged.end_span();
    }
    if (item.partial >= 0) {
      std::copy_n(scratch.merged.values(), rows * a.head_dim, partial_values + item.partial * a.head_dim);
      std::copy_n(scratch.merged.states(), rows, partial_states + item.partial);
    } else {
      finish<Activation, Cache>(item, rows, scratch.merged);
    }
  }

  // Keys of a split, counted from its start, that rows [row, row + count) of an item see between them.
  struct Range {
    int64_t first, last;
  };
  Range visible(const Item& item, int64_t split, int64_t row, int64_t count) const {
    const int64_t position = start(item.sequence) + item.first_query;
    const int64_t low = first_visible(position + row / group),
                  high = position + (row + count - 1) / group + 1;
    const int64_t first = std::max<int64_t>(0, low - split * SPLIT),
                  last = std::min(SPLIT, high - split * SPLIT);
    return {first, std::max(first, last)};
  }

  template <class T>
  void run_split(const Item& item, int64_t split, int64_t rows, Scratch& scratch) {
    const Range all = visible(item, split, 0, rows);
    const T *keys[SPLIT + 2 * AHEAD], *values[SPLIT + 2 * AHEAD];
    const int64_t low = split * SPLIT + all.first, high = split * SPLIT + all.last;
    locate(item, a.k_cache, low, high, a.k_block_stride, a.k_slot_stride, keys + all.first);
    locate(item, a.v_cache, low, high, a.v_block_stride, a.v_slot_stride, values + all.first);
    // After the keys the first values are read, after the values the keys that follow, in this item or
    // perhaps the next: they are fetched ahead. Places are repeated where the context ends.
    for (int64_t i = 0; i < 2 * AHEAD; ++i) {
      keys[all.last + i] = values[std::min(all.first + i, all.last - 1)];
      values[all.last + i] = keys[all.last - 1];
    }
    const int64_t end = std::min<int64_t>(high + 2 * AHEAD, a.context_lens[item.sequence]);
    if (high < end) locate(item, a.k_cache, high, end, a.k_block_stride, a.k_slot_stride, values + all.last);
    // Key tile by key tile, so that a tile's keys are read once.
    const auto each_tile = [&](const auto& body) {
      for (int64_t key = all.first / KEY_TILE * KEY_TILE; key < all.last; key += KEY_TILE)
        for (int64_t row = 0; row < rows; row += ROW_TILE) {
          const int64_t count = std::min(ROW_TILE, rows - row);
          const Range range = visible(item, split, row, count);
          const int64_t first = std::max(key, range.first), last = std::min(key + KEY_TILE, range.last);
          if (first < last) body(row, count, first, last);
        }
    };
    each_tile([&](int64_t row, int64_t count, int64_t first, int64_t last) {
      const float* query = scratch.query.data() + row * a.head_dim;
      float* scores = scratch.scores.data() + row * SPLIT;
      switch (count) {
        case 1: return score_keys<1>(query, keys, first, last, a.head_dim, scores);
        case 2: return score_keys<2>(query, keys, first, last, a.head_dim, scores);
        case 3: return score_keys<3>(query, keys, first, last, a.head_dim, scores);
        default: return score_keys<4>(query, keys, first, last, a.head_dim, scores);
      }
    });
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t tile = r / ROW_TILE * ROW_TILE;
      const Range own = visible(item, split, r, 1),
                  touched = visible(item, split, tile, std::min(ROW_TILE, rows - tile));
      scratch.split_states[r] =
          weigh(scratch.scores.data() + r * SPLIT, own.first, own.last, touched.first, touched.last);
    }
    std::fill_n(scratch.split_values.begin(), rows * a.head_dim, 0.0f);
    each_tile([&](int64_t row, int64_t count, int64_t first, int64_t last) {
      const float* weights = scratch.scores.data() + row * SPLIT;
      float* sums = scratch.split_values.data() + row * a.head_dim;
      switch (count) {
        case 1: return add_values<1>(weights, values, first, last, a.head_dim, sums);
        case 2: return add_values<2>(weights, values, first, last, a.head_dim, sums);
        case 3: return add_values<3>(weights, values, first, last, a.head_dim, sums);
        default: return add_values<4>(weights, values, first, last, a.head_dim, sums);
      }
    });
  }

  template <class Activation, class Cache>
  void finish(const Item& item, int64_t rows, Merged& merged) {
    for (int64_t r = 0; r < rows; ++r) {
      float* values = merged.values() + r * a.head_dim;
      in_head_order(values, a.head_dim, static_cast<const Cache*>(a.v_cache));
      Activation* to = static_cast<Activation*>(a.output) +
                       (query_row<Activation>(item, r) - static_cast<const Activation*>(a.query));
      const vf total = set1(merged.states()[r].total);
      for (int64_t d = 0; d < a.head_dim; d += W) store(to + d, div(load(values + d), total));
    }
  }

  template <class Activation, class Cache>
  void merge_item(const Item& item) {
    const int64_t rows = item.num_queries * group;
    Merged merged;
    merged.start(rows, a.head_dim);
    int64_t row = item.partial;
    for (int64_t split = item.first_split; split <= item.last_split; ++split, row += rows) {
      split = end_of_piece(item, split);
      merged.add(partial_states + row, partial_values + row * a.head_dim);
      if (split % SPAN == SPAN - 1 || split == item.last_split) merged.end_span();
    }
    finish<Activation, Cache>(item, rows, merged);
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
