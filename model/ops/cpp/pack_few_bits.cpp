// How weights become such of few bits (few_bits.h).
#include <cmath>

#include "few_bits.h"

namespace gemserve {
namespace {

half to_half(float x) { return static_cast<half>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }

// A group as it is stored.
struct Group {
  half scale, low;
  uint8_t u[GROUP];
};

// Rounds to u of [0, highest] with these float16 values, and says how far off that is: the largest error, and the sum of squares. Both
// are infinite where float16 can't hold the values.
struct Errors {
  float largest = 0.0f, squares = 0.0f;
};
Errors round_group(const float* w, float scale, float low, int highest, Group& group) {
  group.scale = to_half(scale);
  group.low = to_half(low);
  const float step = _cvtsh_ss(group.scale), base = _cvtsh_ss(group.low);
  Errors errors;
  for (int64_t i = 0; i < GROUP; ++i) {
    const float u = step > 0.0f ? std::nearbyint((w[i] - base) / step) : 0.0f;
    group.u[i] = static_cast<uint8_t>(std::max(0.0f, std::min(static_cast<float>(highest), u)));
    const float error = std::fabs(base + step * group.u[i] - w[i]);
    errors.largest = std::max(errors.largest, error);
    errors.squares += error * error;
  }
  return std::isfinite(errors.squares) ? errors : Errors{INFINITY, INFINITY};
}

// Not a number, so that it shows.
void poison_group(Group& group) {
  group.scale = group.low = to_half(NAN);
  std::memset(group.u, 0, GROUP);
}

// Rounds to the line nearest to values that stand at so many steps above the least one, itself at ``lowest`` steps if zero is one.
Errors round_to_line(const float* w, const float* steps, bool has_zero, float lowest, Group& group) {
  float mean_step = has_zero ? -lowest : 0.0f, mean = 0.0f, products = 0.0f, squares = 0.0f;
  for (int64_t i = 0; i < GROUP && !has_zero; ++i) mean_step += steps[i] / GROUP, mean += w[i] / GROUP;
  for (int64_t i = 0; i < GROUP; ++i) {
    products += (steps[i] - mean_step) * (w[i] - mean);
    squares += (steps[i] - mean_step) * (steps[i] - mean_step);
  }
  const float step = _cvtsh_ss(to_half(products / squares));
  return round_group(w, step, has_zero ? -16 * step : mean - step * mean_step, 31, group);
}

// Whether a group's values lie on a grid of 32 equal steps, as those of GGUF's 4- and 5-bit types do; what float16 scales and
// bfloat16 weights add is below an eighth of a step, and below a 128th of the largest value (a few large values among small ones
// would otherwise pass for a grid of few steps).
bool fits_five_bits(const float* w, Group& group) {
  const float least = *std::min_element(w, w + GROUP), most = *std::max_element(w, w + GROUP), range = most - least;
  const float noise = std::max(std::fabs(least), std::fabs(most)) / 128;
  if (!(range > 0.0f)) {  // one value: zero, or 8 steps above -16 of them
    const float step = std::fabs(least) / 8;
    return std::isfinite(least) && round_group(w, step, -16 * step, 31, group).largest <= noise;
  }
  for (int levels = 1; levels < 32; ++levels) {
    const float step = range / levels, tolerance = std::min(0.125f, noise / step);
    float steps[GROUP];
    bool fits = true;
    for (int64_t i = 0; i < GROUP && fits; ++i) {
      const float exact = (w[i] - least) / step;
      steps[i] = std::nearbyint(exact);
      fits = std::fabs(exact - steps[i]) <= tolerance;
    }
    if (!fits) continue;
    Errors errors = round_to_line(w, steps, false, 0.0f, group);
    const float zero_at = least / step, whole = std::nearbyint(zero_at);
    if (std::fabs(zero_at - whole) <= tolerance && whole >= -16 && whole + levels <= 15) {  // its ends are float16 if its step is
      Group with_zero;
      const Errors others = round_to_line(w, steps, true, whole, with_zero);
      if (others.squares <= errors.squares) errors = others, group = with_zero;
    }
    if (errors.largest <= tolerance * step) return true;
  }
  return false;
}

// As GGUF's Q8_0: the largest stands at 127 steps. False where float16 can't hold the scale, or a value is not finite.
bool fits_eight_bits(const float* w, Group& group) {
  float largest = 0.0f;
  for (int64_t i = 0; i < GROUP; ++i) largest = std::max(largest, std::fabs(w[i]));
  const float step = _cvtsh_ss(to_half(largest / 127));
  return std::isfinite(round_group(w, step, -128 * step, 255, group).squares);
}

// 16 steps between a low and a high end near the least and the largest value, whichever round the group best. Not a number where
// float16 can't hold them.
void round_to_four_bits(const float* w, Group& group) {
  if (fits_five_bits(w, group)) {
    const int least = *std::min_element(group.u, group.u + GROUP), most = *std::max_element(group.u, group.u + GROUP);
    if (most - least < 16) {
      const int from = most < 24 ? std::min(least, 8) : least;  // -8 steps are a float16 whatever the step is
      const float step = _cvtsh_ss(group.scale);
      round_group(w, step, _cvtsh_ss(group.low) + step * from, 15, group);
      return;
    }
  }
  const float least = *std::min_element(w, w + GROUP), range = *std::max_element(w, w + GROUP) - least;
  float best = INFINITY;
  for (int from = 0; from < 4; ++from)
    for (int to = 0; to < 4; ++to) {
      Group candidate;
      const float low = least + range * 0.02f * from, step = range * (1.0f - 0.02f * (from + to)) / 15;
      const float error = round_group(w, step, low, 15, candidate).squares;
      if (error < best) best = error, group = candidate;
    }
  if (best == INFINITY) poison_group(group);
}

void round_to_four_bits_plainly(const float* w, Group& group) {
  const float least = *std::min_element(w, w + GROUP);
  round_group(w, (*std::max_element(w, w + GROUP) - least) / 15, least, 15, group);
  const float step = _cvtsh_ss(group.scale), low = _cvtsh_ss(group.low);
  float error = 0.0f;
  for (int64_t i = 0; i < GROUP; ++i) error += low + step * group.u[i] - w[i];
  group.low = to_half(low - error / GROUP);
}

// A weight as it came; zeros beyond the last feature.
template <class In>
struct Source {
  const In* values;
  int64_t n, k;
  void operator()(int64_t feature, int64_t g, float* w) const {
    for (int64_t i = 0; i < GROUP; ++i) w[i] = feature < n ? widen(values[feature * k + g * GROUP + i]) : 0.0f;
  }
};

template <class In>
uint8_t bits_of_panel(const Source<In>& source, int64_t p) {
  uint8_t bits = 5;
  float w[GROUP];
  Group group;
  for (int64_t j = 0; j < NR; ++j)
    for (int64_t g = 0; g < source.k / GROUP; ++g) {
      source(p * NR + j, g, w);
      if (bits == 5 && !fits_five_bits(w, group)) bits = 8;
      if (bits == 8 && !fits_eight_bits(w, group)) return 0;
    }
  return bits;
}

void put(const Group& group, int bits, int feature, uint8_t* to) {
  const int upper = feature / W, lane = feature % W * 4;
  for (int64_t i = 0; i < GROUP; ++i) {
    const int64_t q = i / 4, at = lane + i % 4;
    to[q * VECTOR + at] |= static_cast<uint8_t>((group.u[i] & 15) << 4 * upper);
    if (bits == 5) to[(QUADS + upper) * VECTOR + at] |= static_cast<uint8_t>(group.u[i] >> 4 << q);
    if (bits == 8) to[(QUADS + q) * VECTOR + at] |= static_cast<uint8_t>(group.u[i] >> 4 << 4 * upper);
  }
}

// read(feature, group, w) says what the weight is.
template <class Read>
void pack(const PackedWeight& weight, const Read& read, void (*round_to_four)(const float*, Group&), int threads) {
  const int64_t k = weight.k;
  parallel_for(num_panels(weight.n), threads, 1, [&](int64_t p) {
    const Panel panel = panel_of(weight, p);
    uint8_t* to = const_cast<uint8_t*>(panel.data);
    half* scales = const_cast<half*>(panel.scales);
    std::memset(to, 0, k / GROUP * group_bytes(panel.bits));
    float w[GROUP];
    Group group;
    for (int j = 0; j < NR; ++j)
      for (int64_t g = 0; g < k / GROUP; ++g) {
        read(p * NR + j, g, w);
        if (panel.bits == 4)
          round_to_four(w, group);
        else
          panel.bits == 5 ? fits_five_bits(w, group) : fits_eight_bits(w, group);
        put(group, panel.bits, j, to + g * group_bytes(panel.bits));
        scales[g * SCALES + j] = group.scale;
        scales[g * SCALES + NR + j] = group.low;
      }
  });
}

}  // namespace

void pack_few_bits(const PackedWeight& weight, const void* source, bool source_bf16, int threads) {
  if (source_bf16)
    pack(weight, Source<bf16>{static_cast<const bf16*>(source), weight.n, weight.k}, round_to_four_bits, threads);
  else
    pack(weight, Source<float>{static_cast<const float*>(source), weight.n, weight.k}, round_to_four_bits, threads);
}

void pack_plain_four_bits(const PackedWeight& weight, const PackedWeight& int8, int threads) {
  const auto read = [&](int64_t feature, int64_t g, float* w) { int8_group(int8, feature, g, w); };
  pack(weight, read, round_to_four_bits_plainly, threads);
}

}  // namespace gemserve

using namespace gemserve;

extern "C" {

int64_t few_bits_panels(int64_t n) { return num_panels(n); }
int64_t few_bits_panel_bytes(int64_t k, int32_t bits) { return k / GROUP * group_bytes(bits); }
int64_t few_bits_scales(int64_t n, int64_t k) { return num_panels(n) * (k / GROUP) * SCALES; }

// The bits that each panel of a weight [n, k] needs: 5 where nothing is lost by it, else 8; 0 where a scale is beyond float16.
void few_bits_needed(const void* source, int32_t source_bf16, int64_t n, int64_t k, uint8_t* bits, int32_t threads) {
  parallel_for(num_panels(n), threads, 1, [&](int64_t p) {
    bits[p] = source_bf16 ? bits_of_panel(Source<bf16>{static_cast<const bf16*>(source), n, k}, p)
                          : bits_of_panel(Source<float>{static_cast<const float*>(source), n, k}, p);
  });
}

}  // extern "C"
