// The likeliest token of hidden states without all the logits. A sketch of the head, 4 bits a weight, says
// about where every logit lies; only panels that may hold the largest one are computed as the whole product
// computes them, to the same bits.
//
// What the sketch leaves out is rounding errors, of weights up to half a step and of inputs likewise. What
// the errors of a group of weights have in common is taken at its worst; what is left of them is taken as
// independent of the inputs and of each other. Then an error of more than DEVIATIONS times their standard
// deviation has a chance of 10^-15, and beside the worst of what is in common one of 10^-8. That is no proof:
// inputs could follow the errors of one token's weights.
#include <cmath>
#include <vector>

#include "few_bits.h"

namespace gemserve {
namespace {

constexpr float DEVIATIONS = 8.0f;
constexpr int64_t SKETCH_BYTES = group_bytes(4, true);

const uint8_t* first_panel_data(const PackedWeight& sketch) {
  return static_cast<const uint8_t*>(sketch.data) + *static_cast<const int64_t*>(sketch.data);
}

// A panel's spreads: for each group the mean squares of a feature's errors and of its weights (the mean over
// the features, times what the largest of them, over all groups, is above it; but at least half of any
// feature's own), then zeros. Likewise a row's squares: of a group's inputs and of their errors. A row far
// from 1 gets NaN: with squares beyond float32 nothing is known.
int64_t spreads_of(int64_t k) { return ceil_div(2 * (k / GROUP), W) * W; }

void squares_of_row(const RoundedRows& x, int64_t tile, int row, float exact_step, float* squares) {
  const int rows = x.tiles.rows(tile);
  const int32_t* quads = x.quads_of(tile);
  const float* factors = x.factors_of(tile);
  std::memset(squares, 0, spreads_of(x.k) * sizeof(float));
  float sum = 0.0f;
  for (int64_t g = 0; g < x.k / GROUP; ++g) {
    int32_t total = 0;
    for (int64_t q = 0; q < QUADS; ++q) {
      int8_t inputs[4];
      std::memcpy(inputs, quads + ((g * QUADS + q) * rows + row) * COPIES, 4);
      for (const int32_t input : inputs) total += input * input;
    }
    const float step = factors[2 * g * rows + row];
    squares[2 * g] = step * step * static_cast<float>(total);
    squares[2 * g + 1] = (step * step + exact_step * exact_step) * GROUP / 12;
    sum += squares[2 * g];
  }
  if (!(sum > 1e-10f && sum < 1e20f)) squares[0] = NAN;
}

float largest_of_panel(const float* sums, int64_t valid) {
  if (valid == NR) return max_lanes(max(load(sums), load(sums + W)));
  return *std::max_element(sums, sums + valid);
}

// Of a feature's group. Mean errors m and sums s of the groups' inputs come to sqrt(groups) * sqrt(sum of (m
// s)^2) at most, where s^2 is at most GROUP times the inputs' squares; there is room for twice that.
struct Spread {
  float of_errors, of_weights;  // mean squares
};
Spread spread_of(const PackedWeight& sketch, const PackedWeight& head, int64_t p, int j, int64_t g) {
  const uint8_t* group = first_panel_data(sketch) + (p * (sketch.k / GROUP) + g) * SKETCH_BYTES;
  const half* scales = reinterpret_cast<const half*>(group + weights_bytes(4)) + j;
  const float step = _cvtsh_ss(scales[0]), middle = _cvtsh_ss(scales[NR]);
  float exact[GROUP], errors = 0.0f, squares = 0.0f, weights = 0.0f;
  int8_group(head, p * NR + j, g, exact);
  for (int64_t i = 0; i < GROUP; ++i) {
    const int u = group[i / 4 * VECTOR + j % W * 4 + i % 4] >> j / W * 4 & 15;
    const float w = middle + step * static_cast<float>(u - centre_of(4)), error = exact[i] - w;
    errors += error;
    squares += error * error;
    weights += w * w;
  }
  const float mean = errors / GROUP, groups = static_cast<float>(sketch.k / GROUP);
  const float of_mean = 4 * GROUP * mean * mean * std::max(1.0f, groups / (DEVIATIONS * DEVIATIONS));
  return {std::isfinite(squares) ? std::max(0.0f, squares / GROUP - mean * mean) + of_mean : NAN,
          weights / GROUP};
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
  const int64_t count = spreads_of(k);
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
          vf variance = zero();
          for (int64_t i = 0; i < count; i += W)
            variance = fma(load(spreads + panel * count + i), load(squares + row * count + i), variance);
          const float room = DEVIATIONS * std::sqrt(sum_lanes(variance));
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
  pack_plain_four_bits(*sketch, *head, threads);
  const int64_t groups = sketch->k / GROUP;
  parallel_for(num_panels(sketch->n), threads, 64, [&](int64_t p) {
    float of_features[NR][2] = {}, largest[2] = {}, mean[2] = {};
    std::vector<float> least(2 * groups);
    float* out = spreads + p * spreads_of(sketch->k);
    std::memset(out, 0, spreads_of(sketch->k) * sizeof(float));
    for (int64_t g = 0; g < groups; ++g)
      for (int j = 0; j < NR; ++j) {
        const Spread spread = spread_of(*sketch, *head, p, j, g);
        const float both[2] = {spread.of_errors, spread.of_weights};
        for (int i = 0; i < 2; ++i) {
          out[2 * g + i] += both[i] / NR;
          mean[i] += both[i] / NR;
          of_features[j][i] += both[i];
          least[2 * g + i] = std::max(least[2 * g + i], both[i] / 2);
        }
      }
    for (int j = 0; j < NR; ++j)
      for (int i = 0; i < 2; ++i) largest[i] = std::max(largest[i], of_features[j][i]);
    for (int64_t i = 0; i < groups * 2; ++i)
      if (mean[i % 2] > 0.0f) out[i] = std::max(out[i] * (largest[i % 2] / mean[i % 2]), least[i]);
    if (!std::isfinite(mean[0] + mean[1])) out[0] = NAN;  // a panel that is always looked at
  });
}

// The likeliest token of each of m hidden states, the lowest id among equals; -1 where a hidden state or a
// logit that was looked at is not finite. Returns how many panels were computed in full.
int64_t greedy(const PackedWeight* head, const PackedWeight* sketch, const float* spreads, const void* x,
               int32_t x_bf16, int64_t m, int64_t* ids, int32_t threads) {
  if (m == 0) return 0;
  const int64_t k = head->k, total = num_panels(head->n);
  const RoundedRows rounded = round_rows(x, x_bf16, m, k, threads);
  int32_t* pairs = workspace<int32_t, kExact>(m * (k / 2));
  float* row_scales = workspace<float, kExact>(m);
  round_rows_to_int16(x, x_bf16, m, k, pairs, row_scales, threads);
  float* squares = workspace<float, kSums>(m * spreads_of(k));
  for (int64_t t = 0; t < rounded.tiles.count; ++t)
    for (int r = 0; r < rounded.tiles.rows(t); ++r) {
      const int64_t row = rounded.tiles.first(t) + r;
      squares_of_row(rounded, t, r, row_scales[row], squares + row * spreads_of(k));
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
