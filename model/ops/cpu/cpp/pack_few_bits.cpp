// How weights become such of few bits (few_bits.h).
#include <cmath>

#include "few_bits.h"

namespace gemserve {
namespace {

half to_half(float x) { return static_cast<half>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }

// A group as it is stored.
struct Group {
  half scale, middle;
  uint8_t u[GROUP];
};

// Rounds to u of so many bits with these float16 values, and says how far off that is: the largest error, and
// the sum of squares. Both are infinite where float16 can't hold the values.
struct Errors {
  float largest = 0.0f, squares = 0.0f;
};
Errors round_group(const float* w, float scale, float middle, int bits, Group& group) {
  group.scale = to_half(scale);
  group.middle = to_half(middle);
  const float step = _cvtsh_ss(group.scale), base = _cvtsh_ss(group.middle) - centre_of(bits) * step;
  Errors errors;
  for (int64_t i = 0; i < GROUP; ++i) {
    const float u = step != 0.0f ? std::nearbyint((w[i] - base) / step) : 0.0f;
    group.u[i] =
        static_cast<uint8_t>(std::max(0.0f, std::min(static_cast<float>(2 * centre_of(bits) - 1), u)));
    const float error = std::fabs(base + step * group.u[i] - w[i]);
    errors.largest = std::max(errors.largest, error);
    errors.squares += error * error;
  }
  return std::isfinite(errors.squares) ? errors : Errors{INFINITY, INFINITY};
}

// Not a number, so that it shows.
void poison_group(Group& group) {
  group.scale = group.middle = to_half(NAN);
  std::memset(group.u, 0, GROUP);
}

// Rounds to the line nearest to values that stand at so many steps from a place.
Errors round_to_line(const float* w, const float* steps, Group& group) {
  float mean_step = 0.0f, mean = 0.0f, products = 0.0f, squares = 0.0f;
  for (int64_t i = 0; i < GROUP; ++i) mean_step += steps[i] / GROUP, mean += w[i] / GROUP;
  for (int64_t i = 0; i < GROUP; ++i) {
    products += (steps[i] - mean_step) * (w[i] - mean);
    squares += (steps[i] - mean_step) * (steps[i] - mean_step);
  }
  const float step = _cvtsh_ss(to_half(products / squares));
  return round_group(w, step, mean + step * (centre_of(5) - mean_step), 5, group);
}

// Likewise, the line through zero, which is the place. 16 steps can be below it, or above it as those of a
// negative scale.
Errors round_to_line_through_zero(const float* w, const float* steps, Group& group) {
  float products = 0.0f, squares = 0.0f;
  for (int64_t i = 0; i < GROUP; ++i) products += steps[i] * w[i], squares += steps[i] * steps[i];
  const bool turned = *std::max_element(steps, steps + GROUP) > 15;
  return round_group(w, turned ? -products / squares : products / squares, 0.0f, 5, group);
}

// Whether a group's values lie on a grid of 32 equal steps, as those of GGUF's 4- and 5-bit types do; what
// float16 scales and bfloat16 weights add is below an eighth of a step, and below a 128th of the largest
// value (a few large values among small ones would otherwise pass for a grid of few steps).
bool fits_five_bits(const float* w, Group& group) {
  const float least = *std::min_element(w, w + GROUP), most = *std::max_element(w, w + GROUP),
              range = most - least;
  const float noise = std::max(std::fabs(least), std::fabs(most)) / 128;
  if (!(range > 0.0f))  // one value: zero, or 8 steps from it
    return std::isfinite(least) && round_group(w, -least / 8, 0.0f, 5, group).largest <= noise;
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
    Errors errors = round_to_line(w, steps, group);
    const float zero_at = least / step, whole = std::nearbyint(zero_at);
    if (std::fabs(zero_at - whole) <= tolerance && whole >= -16 &&
        whole + levels <= (whole > -16 ? 16 : 15)) {
      for (float& place : steps) place += whole;
      Group with_zero;
      const Errors others = round_to_line_through_zero(w, steps, with_zero);
      // Noise suits the freer line better.
      if (others.squares <= 2.0f * errors.squares && others.largest <= tolerance * step)
        errors = others, group = with_zero;
    }
    if (errors.largest <= tolerance * step) return true;
  }
  return false;
}

// As GGUF's Q8_0: the largest stands at 127 steps. False where float16 can't hold the scale, or a value is
// not finite.
bool fits_eight_bits(const float* w, Group& group) {
  float largest = 0.0f;
  for (int64_t i = 0; i < GROUP; ++i) largest = std::max(largest, std::fabs(w[i]));
  return std::isfinite(round_group(w, largest / 127, 0.0f, 8, group).squares);
}

// Whether what fits five bits lies on 16 of its 32 steps. Where it can, with the same middle: 8 steps can be
// below it, or above it as those of a negative scale. Else with the one nearest to it, which float16 holds
// best.
bool fits_four_bits(const float* w, const Group& five, Group& group) {
  const int least = *std::min_element(five.u, five.u + GROUP),
            most = *std::max_element(five.u, five.u + GROUP);
  if (most - least >= 16) return false;
  const float step = _cvtsh_ss(five.scale), middle = _cvtsh_ss(five.middle);
  const bool turned = most == centre_of(5) + 8 && least > centre_of(5) - 8;
  const int from = std::max(most - 15, std::min(least, 8));  // the step that becomes the lowest of the 16
  if (turned || (from == 8 && middle == 0.0f))
    return std::isfinite(round_group(w, turned ? -step : step, middle, 4, group).squares);
  float mean = 0.0f;  // of what the middle has to be; rounded to float16 once
  for (int64_t i = 0; i < GROUP; ++i)
    mean += (w[i] - step * static_cast<float>(five.u[i] - from - centre_of(4))) / GROUP;
  return std::isfinite(round_group(w, step, mean, 4, group).squares);
}

// 16 steps between a low and a high end near the least and the largest value, whichever round the group best.
// Not a number where float16 can't hold them.
void round_to_four_bits(const float* w, Group& group) {
  Group five;
  if (fits_five_bits(w, five) && fits_four_bits(w, five, group)) return;
  const float least = *std::min_element(w, w + GROUP), range = *std::max_element(w, w + GROUP) - least;
  float best = INFINITY;
  for (int from = 0; from < 4; ++from)
    for (int to = 0; to < 4; ++to) {
      Group candidate;
      const float low = least + range * 0.02f * from, step = range * (1.0f - 0.02f * (from + to)) / 15;
      const float error = round_group(w, step, low + centre_of(4) * step, 4, candidate).squares;
      if (error < best) best = error, group = candidate;
    }
  if (best == INFINITY) poison_group(group);
}

// The steps between the least and the largest value, moved by the dither [GROUP] of each input, which leaves
// no value further than half a step away; the errors add up to about nothing.
void round_to_dithered_four_bits(const float* w, const float* dither, Group& group) {
  const float least = *std::min_element(w, w + GROUP), range = *std::max_element(w, w + GROUP) - least;
  group.scale = to_half(range / 15);
  const float step = _cvtsh_ss(group.scale),
              base = _cvtsh_ss(to_half(least + centre_of(4) * step)) - centre_of(4) * step;
  float error = 0.0f;
  for (int64_t i = 0; i < GROUP; ++i) {
    const float u = step != 0.0f ? std::nearbyint((w[i] - base) / step - dither[i]) : 0.0f;
    group.u[i] = static_cast<uint8_t>(std::max(0.0f, std::min(15.0f, u)));
    error += base + step * (static_cast<float>(group.u[i]) + dither[i]) - w[i];
  }
  group.middle = to_half(base + centre_of(4) * step - error / GROUP);
}

// A weight as it came; zeros beyond the last feature.
template <class In>
struct Source {
  const In* values;
  int64_t n, k;
  void operator()(int64_t feature, int64_t g, float* w) const {
    for (int64_t i = 0; i < GROUP; ++i)
      w[i] = feature < n ? widen(values[feature * k + g * GROUP + i]) : 0.0f;
  }
};

// The rounding of a panel's form. For more than 4 bits, only what ``form_of_panel`` found to fit comes here.
void round_to(int bits, int64_t, const float* w, Group& group) {
  if (bits == 4)
    round_to_four_bits(w, group);
  else
    bits == 5 ? fits_five_bits(w, group) : fits_eight_bits(w, group);
}

template <class In>
uint8_t form_of_panel(const Source<In>& source, int64_t p) {
  bool is_four = true, is_five = true, four_centred = true, five_centred = true;
  float w[GROUP];
  Group five, other;
  for (int64_t j = 0; j < NR; ++j)
    for (int64_t g = 0; g < source.k / GROUP; ++g) {
      source(p * NR + j, g, w);
      is_five = is_five && fits_five_bits(w, five);
      if (!is_five && !fits_eight_bits(w, other)) return 0;  // what fits five fits eight
      is_four = is_four && is_five && fits_four_bits(w, five, other);
      five_centred = five_centred && is_five && _cvtsh_ss(five.middle) == 0.0f;
      four_centred = four_centred && is_four && _cvtsh_ss(other.middle) == 0.0f;
    }
  return is_four ? form_of(4, !four_centred) : is_five ? form_of(5, !five_centred) : form_of(8, false);
}

void put(const Group& group, int bits, int feature, uint8_t* to) {
  const int upper = feature / W, lane = feature % W * 4;
  const auto add = [&](int vector, int64_t i, int value) {
    to[vector * VECTOR + lane + i % 4] |= static_cast<uint8_t>(value);
  };
  for (int64_t i = 0; i < GROUP; ++i) {
    const int u = group.u[i], q = static_cast<int>(i / 4), first = 5 * upper;
    if (bits != 5) add(q, i, (u & 15) << 4 * upper);
    if (bits == 8) add(QUADS + q, i, u >> 4 << 4 * upper);
    if (bits != 5) continue;
    add(first + q % 5, i, q < 5 ? u : u >> 2 << 5);
    if (q == 5 || q == 6) add(first + q - 2, i, (u & 3) << 6);
    if (q == 7) add(first + 3, i, (u >> 1 & 1) << 5), add(first + 4, i, (u & 1) << 5);
  }
}

// read(feature, group, w) says what the weight is, round(bits, group, w, result) rounds a group of it.
template <class Read, class Round>
void pack(const PackedWeight& weight, const Read& read, const Round& round, int threads) {
  const int64_t k = weight.k;
  parallel_for(num_panels(weight.n), threads, 1, [&](int64_t p) {
    const Panel panel = panel_of(weight, p);
    uint8_t* to = const_cast<uint8_t*>(panel.data);
    std::memset(to, 0, k / GROUP * panel.stride());
    float w[GROUP];
    Group group;
    for (int j = 0; j < NR; ++j)
      for (int64_t g = 0; g < k / GROUP; ++g) {
        read(p * NR + j, g, w);
        round(panel.bits, g, w, group);
        uint8_t* at = to + g * panel.stride();
        put(group, panel.bits, j, at);
        half* scales = reinterpret_cast<half*>(at + weights_bytes(panel.bits));
        scales[j] = group.scale;
        if (panel.has_middle) scales[NR + j] = group.middle;
      }
  });
}

}  // namespace

void pack_few_bits(const PackedWeight& weight, const void* source, bool source_bf16, int threads) {
  if (source_bf16)
    pack(weight, Source<bf16>{static_cast<const bf16*>(source), weight.n, weight.k}, round_to, threads);
  else
    pack(weight, Source<float>{static_cast<const float*>(source), weight.n, weight.k}, round_to, threads);
}

void pack_dithered_four_bits(const PackedWeight& weight, const PackedWeight& int8, const float* dither,
                             int threads) {
  const auto read = [&](int64_t feature, int64_t g, float* w) { int8_group(int8, feature, g, w); };
  const auto round = [&](int, int64_t g, const float* w, Group& group) {
    round_to_dithered_four_bits(w, dither + g * GROUP, group);
  };
  pack(weight, read, round, threads);
}

}  // namespace gemserve

using namespace gemserve;

extern "C" {

int64_t few_bits_panels(int64_t n) { return num_panels(n); }
int32_t few_bits_form(int32_t bits, int32_t has_middle) { return form_of(bits, has_middle != 0); }
int64_t few_bits_panel_bytes(int64_t k, int32_t form) {
  return k / GROUP * group_bytes(form & 15, form >> 4);
}

// The forms (bits, and 16 where there are middles) that the panels of a weight [n, k] need: 4 or 5 bits where
// nothing is lost by it, else 8; 0 where a scale is beyond float16.
void few_bits_needed(const void* source, int32_t source_bf16, int64_t n, int64_t k, uint8_t* forms,
                     int32_t threads) {
  parallel_for(num_panels(n), threads, 1, [&](int64_t p) {
    forms[p] = source_bf16 ? form_of_panel(Source<bf16>{static_cast<const bf16*>(source), n, k}, p)
                           : form_of_panel(Source<float>{static_cast<const float*>(source), n, k}, p);
  });
}

}  // extern "C"
