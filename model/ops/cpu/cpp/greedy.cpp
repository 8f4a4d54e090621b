// The likeliest token of hidden states without all the logits. A sketch of the head, 4 bits a weight, says
// about where every logit lies; only panels that may hold the largest one are computed as the whole product
// computes them, to the same bits.
//
// The bound. A logit is the sum of x W over its inputs, with x rounded to 16 bits and W to 8; its sketch is
// the sum of y w, with y rounded to 8 bits and w to 4. With the errors d = x - y and e = W - w, and in each
// group of 32 inputs the mean m of e,
//
//   logit - sketch = sum of d W + sum of m y + sum of (e - m) y.
//
// Proven, for all weights and inputs: a group adds no more than |d| |W| to the first sum (Cauchy-Schwarz) and
// |m| |sum of y| to the second. What is rounded away of logit and sketch is bounded likewise (rounding_of).
//
// Statistical: the third sum, whose worst case would have over a quarter of a Gemma's head computed on
// ordinary text. The sketch rounds with a subtractive dither: w is a step of the group times (u + a number of
// the input's own in [-1/2, 1/2)), u the nearest integer. Over the choice of these numbers e is uniform
// within half a step, whatever the weight is, and errors of different inputs are independent (Schuchman
// 1964). So for weights and inputs that were made without knowing them the sum is sub-Gaussian with its own
// variance, the sum over groups of |y|^2 times the mean square of e - m, and is above t standard deviations
// with a chance of at most exp(-t^2 / 2). DEVIATIONS is 8 because one of the 262,144 logits of a row is then
// above its bound once in 3e8 rows at most (262144 exp(-32) = 3e-9), and once in 6e9 if the sum is as good as
// normal.
//
// Two things are coarser than that. A panel has one set of variances: the mean over its features, scaled to
// the feature with the largest sum, and in no group less than half of any feature's own. So for inputs that
// lie just where a feature is unlike its panel, 8 are at least 8 / sqrt(2) of the feature's own deviations
// (an error above them: exp(-16) = 1e-7 at most, 8e-9 as a normal variable). And where float16 holds the
// middle of a group of nearly equal weights worse than half a step, their errors have the mean square that
// was measured, but are not uniform.
//
// Nothing checks the result afterwards: it is exact unless an error is above its bound, as inputs made of the
// dither and of one token's weights could bring about. logits and argmax are exact always.
#include <cmath>
#include <vector>

#include "few_bits.h"

namespace gemserve {
namespace {

constexpr float DEVIATIONS = 8.0f;
constexpr int64_t SKETCH_BYTES = group_bytes(4, true);

// Numbers in [-1/2, 1/2), one for each input: splitmix64 of its index (Steele, Lea and Flood 2014).
std::vector<float> dither_of(int64_t k) {
  std::vector<float> dither(k);
  for (int64_t i = 0; i < k; ++i) {
    uint64_t z = static_cast<uint64_t>(i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    dither[i] = static_cast<float>((z ^ (z >> 31)) >> 40) * 0x1p-24f - 0.5f;
  }
  return dither;
}

const uint8_t* first_panel_data(const PackedWeight& sketch) {
  return static_cast<const uint8_t*>(sketch.data) + *static_cast<const int64_t*>(sketch.data);
}

// Of a panel, its spreads: [k / 32] variances (mean squares of e - m), then [k / 32][2] limits (|m|, |W|),
// each part filled up with zeros. Of a row likewise: |y|^2, then (|sum of y|, |d| with the share of
// ROUNDING). A row whose squares are near the ends of float32 gets NaN, and so do weights that are not
// finite: nothing is known of them, and the panels are looked at.
int64_t variances_of(int64_t k) { return ceil_div(k / GROUP, W) * W; }
int64_t spreads_of(int64_t k) { return variances_of(k) + ceil_div(2 * (k / GROUP), W) * W; }

// Times |x| |W|, summed over the groups: what float32 may round away. The logit has G + 2 roundings of
// partial sums of at most |x| |W|; the sketch 2 G + 2, of sums of 8 steps |y| and of the middle times y,
// which come to 12.5 |y| |W| at most (the largest weight is at least the middle, and 7.5 steps; 32 inputs are
// up to sqrt(32) times their length). That is 27 (G + 1), taken twice.
float rounding_of(int64_t groups) { return 54 * static_cast<float>(groups + 1) * 0x1p-24f; }

void measure_row(const RoundedRows& x, int64_t tile, int row, const int16_t* exact, float exact_step,
                 float* squares) {
  const int rows = x.tiles.rows(tile);
  const int32_t* quads = x.quads_of(tile);
  const float* factors = x.factors_of(tile);
  const float rounding = rounding_of(x.k / GROUP);
  float* limits = squares + variances_of(x.k);
  std::memset(squares, 0, spreads_of(x.k) * sizeof(float));
  float sum = 0.0f;
  for (int64_t g = 0; g < x.k / GROUP; ++g) {
    const float step = factors[2 * g * rows + row];
    int32_t total = 0;
    float errors = 0.0f, exact_squares = 0.0f;
    for (int64_t q = 0; q < QUADS; ++q) {
      int8_t inputs[4];
      std::memcpy(inputs, quads + ((g * QUADS + q) * rows + row) * COPIES, 4);
      for (const int32_t input : inputs) {
        const float value = exact_step * static_cast<float>(*exact++);
        const float error = value - step * static_cast<float>(input);
        total += input * input;
        errors += error * error;
        exact_squares += value * value;
      }
    }
    squares[g] = step * step * static_cast<float>(total);
    limits[2 * g] = std::fabs(factors[(2 * g + 1) * rows + row]);
    limits[2 * g + 1] = std::sqrt(errors) + step / 7 + rounding * std::sqrt(exact_squares);
    sum += squares[g];
  }
  if (!(sum > 1e-10f && sum < 1e20f)) squares[0] = NAN;
}

float largest_of_panel(const float* sums, int64_t valid) {
  if (valid == NR) return max_lanes(max(load(sums), load(sums + W)));
  return *std::max_element(sums, sums + valid);
}

// Of a feature's group: the mean of e, the mean square of e - m, and |W|.
struct Spread {
  float mean, variance, length;
};
Spread spread_of(const PackedWeight& sketch, const PackedWeight& head, const float* dither, int64_t p, int j,
                 int64_t g) {
  const uint8_t* group = first_panel_data(sketch) + (p * (sketch.k / GROUP) + g) * SKETCH_BYTES;
  const half* scales = reinterpret_cast<const half*>(group + weights_bytes(4)) + j;
  const float step = _cvtsh_ss(scales[0]), middle = _cvtsh_ss(scales[NR]);
  float weights[GROUP], errors[GROUP], mean = 0.0f, variance = 0.0f, squares = 0.0f;
  int8_group(head, p * NR + j, g, weights);
  for (int64_t i = 0; i < GROUP; ++i) {
    const int u = group[i / 4 * VECTOR + j % W * 4 + i % 4] >> j / W * 4 & 15;
    errors[i] = weights[i] - (middle + step * (static_cast<float>(u - centre_of(4)) + dither[g * GROUP + i]));
    mean += errors[i] / GROUP;
    squares += weights[i] * weights[i];
  }
  for (const float error : errors) variance += (error - mean) * (error - mean) / GROUP;
  return {mean, variance, std::sqrt(squares)};
}

// Where the largest logit of each panel lies at most, of every row.
struct Bounds {
  int64_t panels;
  float* values;  // [m][panels]
  float* of(int64_t row) const { return values + row * panels; }
};

void bound_panels(const PackedWeight& sketch, const float* spreads, const RoundedRows& x,
                  const float* squares, const Bounds& most, int threads) {
  const int64_t k = sketch.k, groups = k / GROUP, total = num_panels(sketch.n),
                items = ceil_div(total, PANELS);
  const int64_t variances = variances_of(k), count = spreads_of(k);
  const uint8_t* data = first_panel_data(sketch);
  parallel_for(items, threads, std::max<int64_t>(1, items / (threads * 64)), [&](int64_t item) {
    alignas(64) float sums[MAX_ROWS * PANELS * NR];
    const int64_t first = item * PANELS, panels = std::min<int64_t>(PANELS, total - first);
    for (int64_t t = 0; t < x.tiles.count; ++t) {
      const int rows = x.tiles.rows(t);
      for (int64_t p = 0; p < panels; ++p)
        with_rows(rows, [&](auto number) {
          few_bits_tile<4, true, decltype(number)::value>(x.quads_of(t), x.factors_of(t), x.starts_of(t),
                                                          data + (first + p) * groups * SKETCH_BYTES, k,
                                                          sums + p * NR, PANELS * NR);
        });
      // All panels at last, so that none of them waits for another's square root.
      for (int r = 0; r < rows; ++r) {
        const int64_t row = x.tiles.first(t) + r;
        for (int64_t p = 0; p < panels; ++p) {
          const int64_t panel = first + p, valid = std::min<int64_t>(NR, sketch.n - panel * NR);
          const float *of_panel = spreads + panel * count, *of_row = squares + row * count;
          vf variance = zero(), limit = zero();
          for (int64_t i = 0; i < variances; i += W)
            variance = fma(load(of_panel + i), load(of_row + i), variance);
          for (int64_t i = variances; i < count; i += W)
            limit = fma(load(of_panel + i), load(of_row + i), limit);
          const float room = DEVIATIONS * std::sqrt(sum_lanes(variance)) + sum_lanes(limit);
          most.of(row)[panel] = largest_of_panel(sums + (r * PANELS + p) * NR, valid) + room;
        }
      }
    }
  });
}

// The largest logit that was computed, the lowest id among equals.
struct Best {
  float value = -INFINITY;
  int64_t id = -1, num_panels = 0;
  bool finite = true;

  void look_at(const PackedWeight& head, int64_t panel, const int32_t* pairs, float row_scale) {
    alignas(64) float logits[NR];
    int8_panel(head, panel, pairs, row_scale, logits);
    ++num_panels;
    for (int64_t j = 0; j < std::min<int64_t>(NR, head.n - panel * NR); ++j) {
      finite = finite && std::isfinite(logits[j]);
      if (logits[j] > value) value = logits[j], id = panel * NR + j;
    }
  }
};

}  // namespace
}  // namespace gemserve

using namespace gemserve;

extern "C" {

int64_t sketch_spreads(int64_t k) { return spreads_of(k); }

// The sketch (kFewBits, with room for 4 bits and middles) of an int8 head, and its spreads
// [panels][sketch_spreads].
void pack_sketch(const PackedWeight* sketch, float* spreads, const PackedWeight* head, int32_t threads) {
  const std::vector<float> dither = dither_of(head->k);
  pack_dithered_four_bits(*sketch, *head, dither.data(), threads);
  const int64_t groups = sketch->k / GROUP;
  parallel_for(num_panels(sketch->n), threads, 64, [&](int64_t p) {
    float *variances = spreads + p * spreads_of(sketch->k), *limits = variances + variances_of(sketch->k);
    std::memset(variances, 0, spreads_of(sketch->k) * sizeof(float));
    float of_features[NR] = {}, mean = 0.0f;
    bool finite = true;
    std::vector<float> least(groups);
    for (int64_t g = 0; g < groups; ++g)
      for (int j = 0; j < NR; ++j) {
        const Spread spread = spread_of(*sketch, *head, dither.data(), p, j, g);
        variances[g] += spread.variance / NR;
        mean += spread.variance / NR;
        of_features[j] += spread.variance;
        least[g] = std::max(least[g], spread.variance / 2);
        limits[2 * g] = std::max(limits[2 * g], std::fabs(spread.mean));
        limits[2 * g + 1] = std::max(limits[2 * g + 1], spread.length);
        finite = finite && std::isfinite(spread.variance + spread.length);
      }
    const float largest = *std::max_element(of_features, of_features + NR);
    for (int64_t g = 0; g < groups && mean > 0.0f; ++g)
      variances[g] = std::max(variances[g] * (largest / mean), least[g]);
    if (!finite) variances[0] = NAN;  // a panel that is always looked at
  });
}

// The likeliest token of each of m hidden states, the lowest id among equals; -1 where a hidden state or a
// logit that was looked at is not finite. Returns how many panels were computed in full.
int64_t greedy(const PackedWeight* head, const PackedWeight* sketch, const float* spreads, const void* x,
               int32_t x_bf16, int64_t m, int64_t* ids, int32_t threads) {
  if (m == 0) return 0;
  const int64_t k = head->k, total = num_panels(head->n);
  const std::vector<float> dither = dither_of(k);
  const RoundedRows rounded = round_rows(x, x_bf16, m, k, threads, dither.data());
  int32_t* pairs = workspace<int32_t, kExact>(m * (k / 2));
  float* row_scales = workspace<float, kExact>(m);
  round_rows_to_int16(x, x_bf16, m, k, pairs, row_scales, threads);
  float* squares = workspace<float, kSums>(m * spreads_of(k));
  for (int64_t t = 0; t < rounded.tiles.count; ++t)
    for (int r = 0; r < rounded.tiles.rows(t); ++r) {
      const int64_t row = rounded.tiles.first(t) + r;
      const int16_t* exact = reinterpret_cast<const int16_t*>(pairs + row * (k / 2));
      measure_row(rounded, t, r, exact, row_scales[row], squares + row * spreads_of(k));
    }
  const Bounds most{total, workspace<float, kBounds>(m * total)};
  bound_panels(*sketch, spreads, rounded, squares, most, threads);

  // A row's panels are looked at in pieces, so that one row has work for all threads; the most promising one
  // before all others.
  const int64_t pieces = ceil_div(4 * threads, m);
  std::vector<Best> firsts(m), bests(m * pieces);
  parallel_for(m, threads, 1, [&](int64_t row) {
    const float* bounds = most.of(row);
    float highest = bounds[0];
    int64_t panel = 0;
    for (int64_t p = 1; p < total; ++p)
      if (bounds[p] > highest) highest = bounds[p], panel = p;
    firsts[row].look_at(*head, panel, pairs + row * (k / 2), row_scales[row]);
  });
  parallel_for(m * pieces, threads, 1, [&](int64_t item) {
    const int64_t row = item / pieces, piece = item % pieces;
    if (!firsts[row].finite) return;
    const float *bounds = most.of(row), least = firsts[row].value;
    for (int64_t p = piece * total / pieces; p < (piece + 1) * total / pieces; ++p)
      if (!(bounds[p] < least)) bests[item].look_at(*head, p, pairs + row * (k / 2), row_scales[row]);
  });
  int64_t num_computed = 0;
  for (int64_t row = 0; row < m; ++row) {
    Best best = firsts[row];
    for (int64_t item = row * pieces; item < (row + 1) * pieces; ++item) {
      const Best& other = bests[item];
      if (other.value > best.value || (other.value == best.value && other.id < best.id))
        best.value = other.value, best.id = other.id;
      best.finite = best.finite && other.finite;
      best.num_panels += bests[item].num_panels;
    }
    ids[row] = best.finite ? best.id : -1;
    num_computed += best.num_panels;
  }
  return num_computed;
}

}  // extern "C"
