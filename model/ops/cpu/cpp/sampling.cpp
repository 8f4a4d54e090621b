// Sampling over whole rows of logits without sorting them: every row is cut into pieces at fixed places,
// pieces are shared among the threads, and their results are joined in ascending order, so that the outcome
// depends on the row alone.
#include <cstring>
#include <utility>
#include <vector>

#include "sampling.h"

namespace gemserve {
namespace {

// The k best of what it has seen, ids in ascending order.
class Best {
 public:
  explicit Best(int64_t k) : k(k), limit(2 * k + 256) { kept.reserve(limit); }

  void look(const float* x, int64_t first, int64_t last, float top) {
    if (full && !(top > threshold)) return;
    int64_t i = first;
    for (; i + W <= last; i += W) {
      uint32_t mask = full ? greater_mask(load(x + i), set1(threshold)) : (1u << W) - 1;
      for (; mask; mask &= mask - 1) add(x, i + __builtin_ctz(mask));
    }
    for (; i < last; ++i) add(x, i);
  }

  std::vector<Candidate>& finish() {
    shrink();
    return kept;
  }

 private:
  const int64_t k, limit;
  bool full = false;
  float threshold = NEVER;
  std::vector<Candidate> kept;

  void add(const float* x, int64_t i) {
    if (full && !(x[i] > threshold)) return;
    kept.push_back({x[i] == x[i] ? x[i] : NEVER, static_cast<int32_t>(i)});
    if (static_cast<int64_t>(kept.size()) == limit) shrink();
  }
  void shrink() {
    if (static_cast<int64_t>(kept.size()) < k) return;
    std::nth_element(kept.begin(), kept.begin() + (k - 1), kept.end());
    kept.resize(k);
    threshold = kept.back().value;
    full = true;
  }
};

// All of a row, likeliest first, equals in ascending order of id: a radix sort, whose passes keep the order
// of equals.
void sort_row(const float* x, int64_t size, std::vector<Candidate>& sorted) {
  struct Entry {
    uint32_t key;  // ascending where the value descends
    int32_t id;
  };
  constexpr int DIGITS = 3, BITS = 11, BUCKETS = 1 << BITS;
  std::vector<Entry> entries(size), other(size);
  std::vector<int64_t> counts(DIGITS * BUCKETS, 0);
  for (int64_t i = 0; i < size; ++i) {
    const float value = x[i] == x[i] ? x[i] + 0.0f : NEVER;  // both zeros are equal
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t key = bits >> 31 ? bits : ~(bits | 0x80000000u);
    entries[i] = {key, static_cast<int32_t>(i)};
    for (int digit = 0; digit < DIGITS; ++digit)
      ++counts[digit * BUCKETS + ((key >> (digit * BITS)) & (BUCKETS - 1))];
  }
  for (int digit = 0; digit < DIGITS; ++digit) {
    int64_t* places = &counts[digit * BUCKETS];
    for (int64_t bucket = 0, place = 0; bucket < BUCKETS; ++bucket)
      place += std::exchange(places[bucket], place);
    for (const Entry& entry : entries) other[places[(entry.key >> (digit * BITS)) & (BUCKETS - 1)]++] = entry;
    entries.swap(other);
  }
  sorted.resize(size);
  for (int64_t i = 0; i < size; ++i)
    sorted[i] = {x[entries[i].id] == x[entries[i].id] ? x[entries[i].id] : NEVER, entries[i].id};
}

struct Mass {
  float top = NEVER;
  double total = 0.0;  // sum of e^((x - top) / temperature)
  void rescale(float higher, float inverse) {
    if (top != NEVER) total *= std::exp((static_cast<double>(top) - higher) * inverse);
    top = higher;
  }
};

}  // namespace
}  // namespace gemserve

using namespace gemserve;

extern "C" {

void all_finite(const float* logits, int64_t rows, int64_t size, uint8_t* finite, int32_t threads) {
  std::vector<uint8_t> pieces(rows * ceil_div(size, PIECE));
  each_piece(rows, size, threads, [&](int64_t item, int64_t row, int64_t first, int64_t last) {
    const float* x = logits + row * size;
    vf poison[4] = {zero(), zero(), zero(), zero()};  // x * 0 is NaN for an infinity or a NaN
    int64_t i = first;
    for (; i + 4 * W <= last; i += 4 * W)
      for (int j = 0; j < 4; ++j) poison[j] = fma(load(x + i + j * W), zero(), poison[j]);
    float total = sum_lanes(add(add(poison[0], poison[1]), add(poison[2], poison[3])));
    for (; i < last; ++i) total += x[i] * 0.0f;
    pieces[item] = total == total;
  });
  const int64_t count = ceil_div(size, PIECE);
  for (int64_t row = 0; row < rows; ++row)
    finite[row] = std::all_of(&pieces[row * count], &pieces[row * count] + count,
                              [](uint8_t piece) { return piece != 0; });
}

void argmax(const float* logits, int64_t rows, int64_t size, int64_t* token_ids, int32_t threads) {
  const int64_t count = ceil_div(size, PIECE);
  std::vector<Candidate> pieces(rows * count);
  each_piece(rows, size, threads, [&](int64_t item, int64_t row, int64_t first, int64_t last) {
    const float* x = logits + row * size;
    Candidate best{NEVER, static_cast<int32_t>(first)};
    for (int64_t block = first; block < last; block += BLOCK) {
      const int64_t end = std::min(last, block + BLOCK);
      const float top = largest_of(x + block, end - block);
      if (top > best.value) best = {top, static_cast<int32_t>(std::find(x + block, x + end, top) - x)};
    }
    pieces[item] = best;
  });
  for (int64_t row = 0; row < rows; ++row)
    token_ids[row] = std::min_element(&pieces[row * count], &pieces[row * count] + count)->id;
}

// Leaves of these rows the logits whose bit is set, the lowest bit of a byte first; each mask has ceil(size /
// 8) bytes.
void mask_rows(float* logits, const int64_t* rows, int64_t count, int64_t size, const uint8_t* masks,
               int32_t threads) {
  static_assert(PIECE % 8 == 0, "a byte of a mask belongs to one piece");
  each_piece(count, size, threads, [&](int64_t, int64_t index, int64_t first, int64_t last) {
    const uint8_t* mask = masks + index * ceil_div(size, 8);
    float* x = logits + rows[index] * size;
    int64_t i = first;
    for (; i + 8 <= last; i += 8) {
      const int32_t bits = mask[i / 8];
      if (bits == 0xFF) continue;
      int32_t kept[8];  // without branches: the pattern of a mask can't be foretold
      std::memcpy(kept, x + i, sizeof kept);
      // 0xFF800000 is -infinity.
      for (int j = 0; j < 8; ++j) kept[j] = (bits >> j & 1) ? kept[j] : static_cast<int32_t>(0xFF800000u);
      std::memcpy(x + i, kept, sizeof kept);
    }
    for (; i < last; ++i)
      if (!(mask[i / 8] >> (i % 8) & 1)) x[i] = NEVER;
  });
}

void top_candidates(const float* logits, int64_t rows, int64_t size, int64_t k, const float* temperature,
                    float* values, int64_t* token_ids, float* log_total, int32_t threads) {
  const int64_t count = ceil_div(size, PIECE);
  // With rows enough for every core, one item looks through a whole row, and its threshold soon turns most
  // pieces away. Which candidates are found does not depend on that, and the mass is summed up piece by piece
  // in any case.
  const bool sorts = k > 4096 && k > size / 16;  // so many are found sooner by sorting everything
  const int64_t span = rows >= 2 * threads ? count : 1, items = ceil_div(count, span);
  std::vector<std::vector<Candidate>> kept(rows * items);
  std::vector<Mass> masses(rows * count);
  parallel_for(rows * items, threads, 1, [&](int64_t item) {
    const int64_t row = item / items, first_piece = item % items * span;
    const float* x = logits + row * size;
    const float inverse = reciprocal(temperature[row]);
    Best best(sorts ? 1 : k);
    for (int64_t piece = first_piece; piece < first_piece + span; ++piece) {
      const int64_t last = std::min(size, (piece + 1) * PIECE);
      Mass mass;
      for (int64_t block = piece * PIECE; block < last; block += BLOCK) {
        const int64_t end = std::min(last, block + BLOCK);
        const float top = largest_of(x + block, end - block);
        if (!sorts) best.look(x, block, end, top);
        if (top == NEVER) continue;  // masked throughout
        if (top > mass.top) mass.rescale(top, inverse);
        mass.total += sum_of(x + block, end - block, {mass.top, inverse, 0.0f});
      }
      masses[row * count + piece] = mass;
    }
    if (!sorts) kept[item] = std::move(best.finish());
  });
  parallel_for(rows, count * k * rows < 4096 ? 1 : threads, 1, [&](int64_t row) {
    std::vector<Candidate> all;
    if (sorts) {
      sort_row(logits + row * size, size, all);
    } else {
      for (int64_t i = 0; i < items; ++i)
        all.insert(all.end(), kept[row * items + i].begin(), kept[row * items + i].end());
      std::nth_element(all.begin(), all.begin() + (k - 1), all.end());
      std::sort(all.begin(), all.begin() + k);
    }
    for (int64_t i = 0; i < k; ++i) {
      values[row * k + i] = all[i].value;
      token_ids[row * k + i] = all[i].id;
    }
    double total = 0.0;
    for (int64_t p = 0; p < count; ++p) {
      Mass& mass = masses[row * count + p];
      if (mass.top == NEVER) continue;
      mass.rescale(all[0].value, reciprocal(temperature[row]));
      total += mass.total;
    }
    log_total[row] = static_cast<float>(std::log(total));
  });
}

}  // extern "C"
