// A draw from whole rows of logits by inverse CDF in order of token id, cut at min_p and at top_p, without
// sorting.
//
// Where top_p cuts is found by the mass per bucket of weights: the tokens of the one bucket in which the
// running mass, likeliest first, passes the threshold are sorted, no others. All sums are cut at fixed places
// and joined in ascending order, so that the outcome depends on the row alone.
#include <cstring>
#include <vector>

#include "sampling.h"

namespace gemserve {
namespace {

// Buckets are cut at 4 bits of the mantissa.
constexpr int SHIFT = 19;
// Weights are in [0, 1], and 1 is 0x3f800000.
constexpr int64_t BUCKETS = (int64_t{0x3f800000} >> SHIFT) + 1;

INLINE int64_t bucket_of(float weight) {
  uint32_t bits;
  std::memcpy(&bits, &weight, 4);
  return bits >> SHIFT;
}

// What is kept of a row: weights above the cut, and those equal to it up to an id.
struct Cut {
  float weight = 0.0f;
  int64_t last_equal = std::numeric_limits<int64_t>::max();
  float for_ids_from(int64_t id) const {
    return id <= last_equal ? weight : std::nextafter(weight, std::numeric_limits<float>::infinity());
  }
};

class Draw {
 public:
  Draw(const float* logits, int64_t rows, int64_t size, const float* temperature, const double* top_p,
       const float* min_p, int threads)
      : logits(logits),
        temperature(temperature),
        top_p(top_p),
        min_p(min_p),
        rows(rows),
        size(size),
        pieces(ceil_div(size, PIECE)),
        blocks(ceil_div(size, BLOCK)),
        threads(threads),
        tops(rows),
        cuts(rows),
        sums(rows * blocks) {}

  void run(const double* uniform, int64_t* token_ids) {
    std::vector<float> piece_tops(rows * pieces);
    each_piece(rows, size, threads, [&](int64_t item, int64_t row, int64_t first, int64_t last) {
      piece_tops[item] = largest_of(logits + row * size + first, last - first);
    });
    for (int64_t row = 0; row < rows; ++row) {
      tops[row] = *std::max_element(&piece_tops[row * pieces], &piece_tops[row * pieces] + pieces);
      cuts[row].weight = min_p[row];
    }
    cut_at_top_p();
    each_piece(rows, size, threads, [&](int64_t, int64_t row, int64_t first, int64_t last) {
      for (int64_t block = first; block < last; block += BLOCK)
        sums[row * blocks + block / BLOCK] = sum_range(row, block, std::min(last, block + BLOCK));
    });
    for (int64_t row = 0; row < rows; ++row) token_ids[row] = pick(row, uniform[row]);
  }

 private:
  const float *logits, *temperature;
  const double* top_p;
  const float* min_p;
  const int64_t rows, size, pieces, blocks;
  const int threads;
  std::vector<float> tops;
  std::vector<Cut> cuts;
  std::vector<double> sums;

  Weigher weigher(int64_t row, float cut) const { return {tops[row], reciprocal(temperature[row]), cut}; }

  // Sum of the weights kept among ids [first, last).
  double sum_range(int64_t row, int64_t first, int64_t last) const {
    const float* x = logits + row * size;
    const int64_t border = cuts[row].last_equal < last ? std::max(first, cuts[row].last_equal + 1) : last;
    double total = 0.0;
    if (first < border)
      total += sum_of(x + first, border - first, weigher(row, cuts[row].for_ids_from(first)));
    if (border < last)
      total += sum_of(x + border, last - border, weigher(row, cuts[row].for_ids_from(border)));
    return total;
  }

  void cut_at_top_p() {
    std::vector<int64_t> cutting;
    for (int64_t row = 0; row < rows; ++row)
      if (top_p[row] < 1.0) cutting.push_back(row);
    parallel_for(static_cast<int64_t>(cutting.size()), threads, 1, [&](int64_t i) { cut_row(cutting[i]); });
  }

  // Weights of ids [first, first + count), all of them kept.
  void weigh_block(int64_t row, int64_t first, int64_t count, float* weights) const {
    const Weigher weigh = weigher(row, 0.0f);
    const float* x = logits + row * size + first;
    int64_t i = 0;
    for (; i + W <= count; i += W) store(weights + i, weigh(load(x + i)));
    for (; i < count; ++i) weights[i] = weigh(x[i]);
  }

  void cut_row(int64_t row) {
    std::vector<double> mass(BUCKETS, 0.0);
    alignas(64) float weights[BLOCK];
    const auto each_weight = [&](const auto& body) {
      for (int64_t first = 0; first < size; first += BLOCK) {
        const int64_t count = std::min(BLOCK, size - first);
        weigh_block(row, first, count, weights);
        for (int64_t i = 0; i < count; ++i)
          if (weights[i] > 0.0f && weights[i] <= 1.0f) body(weights[i], first + i);
      }
    };
    each_weight([&](float weight, int64_t) { mass[bucket_of(weight)] += weight; });
    double total = 0.0, before = 0.0;
    for (int64_t bucket = BUCKETS - 1; bucket >= 0; --bucket) total += mass[bucket];
    const double threshold = top_p[row] * total;
    int64_t bucket = BUCKETS - 1;
    for (; bucket > 0 && before + mass[bucket] < threshold; --bucket) before += mass[bucket];
    std::vector<Candidate> border;
    each_weight([&](float weight, int64_t id) {
      if (bucket_of(weight) == bucket) border.push_back({weight, static_cast<int32_t>(id)});
    });
    if (border.empty()) return;  // a row that is not finite, or whose weights all vanish
    std::sort(border.begin(), border.end());
    size_t last = 0;  // the token that crosses the threshold is kept, and the likeliest in any case
    for (double through = before + border[0].value; last + 1 < border.size() && through < threshold;
         through += border[last].value)
      ++last;
    if (border[last].value < cuts[row].weight) return;  // min_p cuts more
    cuts[row] = {border[last].value, border[last].id};
  }

  int64_t pick(int64_t row, double uniform) const {
    const double* block_sums = &sums[row * blocks];
    double total = 0.0;
    for (int64_t b = 0; b < blocks; ++b) total += block_sums[b];
    const double target = std::min(uniform * total, std::nextafter(total, 0.0));
    double before = 0.0;
    for (int64_t b = 0; b < blocks; ++b) {
      const double through = before + block_sums[b];
      if (through > target) {
        // Added up one by one, the block may fall short of its sum by a rounding: then its last possible
        // token is meant.
        int64_t drawn = 0;
        double running = before;
        for (int64_t i = b * BLOCK; i < std::min(size, (b + 1) * BLOCK) && running <= target; ++i) {
          const float weight = weigher(row, cuts[row].for_ids_from(i))(logits[row * size + i]);
          if (weight > 0.0f) drawn = i;
          running += weight;
        }
        return drawn;
      }
      before = through;
    }
    return 0;
  }
};

}  // namespace
}  // namespace gemserve

extern "C" void draw(const float* logits, int64_t rows, int64_t size, const float* temperature,
                     const double* top_p, const float* min_p, const double* uniform, int64_t* token_ids,
                     int32_t threads) {
  gemserve::Draw(logits, rows, size, temperature, top_p, min_p, threads).run(uniform, token_ids);
}
