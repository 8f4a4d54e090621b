// Expands blocks of GGUF's commonest quantised types to float32. The same values, bit for bit, as
// gguf.quants.dequantize: the same products in the same order, and no fused multiply-add (-ffp-contract=off).
// Formats: llama.cpp's ggml-quants.
#include <cstdint>
#include <cstring>

#include "parallel.h"
#include "simd.h"

namespace gemserve {
namespace {

float half_at(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return _cvtsh_ss(bits);
}

void block_q8_0(const uint8_t* in, float* out) {  // half d; int8 q[32]
  const float d = half_at(in);
  for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(static_cast<int8_t>(in[2 + i])) * d;
}

void block_q5_0(const uint8_t* in, float* out) {  // half d; uint32 fifth bits; uint8 nibbles[16]
  const float d = half_at(in);
  uint32_t high;
  std::memcpy(&high, in + 2, sizeof high);
  const uint8_t* q = in + 6;
  for (int i = 0; i < 16; ++i) {
    const int low_half = (q[i] & 15) | static_cast<int>((high >> i & 1) << 4);
    const int high_half = (q[i] >> 4) | static_cast<int>((high >> (i + 16) & 1) << 4);
    out[i] = static_cast<float>(low_half - 16) * d;
    out[i + 16] = static_cast<float>(high_half - 16) * d;
  }
}

void block_q4_k(const uint8_t* in, float* out) {  // half d, dmin; 6-bit scales and minima[12]; nibbles[128]
  const float d = half_at(in), dmin = half_at(in + 2);
  const uint8_t* packed = in + 4;
  const uint8_t* q = in + 16;
  for (int group = 0; group < 8; ++group) {
    int scale, minimum;
    if (group < 4) {
      scale = packed[group] & 63;
      minimum = packed[group + 4] & 63;
    } else {
      scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6 << 4);
      minimum = (packed[group + 4] >> 4) | (packed[group] >> 6 << 4);
    }
    const float factor = d * static_cast<float>(scale), offset = dmin * static_cast<float>(minimum);
    const uint8_t* nibbles = q + group / 2 * 32;
    const int shift = group % 2 * 4;
    for (int i = 0; i < 32; ++i) {
      const float product = factor * static_cast<float>(nibbles[i] >> shift & 15);
      out[group * 32 + i] = product - offset;
    }
  }
}

// Low nibbles[128]; high pairs[64]; int8 scales[16]; half d.
void block_q6_k(const uint8_t* in, float* out) {
  const uint8_t* low = in;
  const uint8_t* high = in + 128;
  const int8_t* scales = reinterpret_cast<const int8_t*>(in + 192);
  const float d = half_at(in + 208);
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128, quarter = i % 128 / 32, lane = i % 32;
    const int nibble = low[half * 64 + quarter % 2 * 32 + lane] >> (quarter / 2 * 4) & 15;
    const int pair = high[half * 32 + lane] >> (quarter * 2) & 3;
    const float factor = d * static_cast<float>(scales[i / 16]);
    out[i] = factor * static_cast<float>((nibble | pair << 4) - 32);
  }
}

using BlockFunction = void (*)(const uint8_t*, float*);

struct Format {
  int64_t bytes, elements;
  BlockFunction expand;
};

const Format kFormats[] = {
    {34, 32, block_q8_0},
    {22, 32, block_q5_0},
    {144, 256, block_q4_k},
    {210, 256, block_q6_k},
};

}  // namespace
}  // namespace gemserve

extern "C" {

// format: index into kFormats. Expands num_blocks blocks; *not_finite becomes 1 when a value is not finite,
// else it stays.
void dequantize(const uint8_t* in, float* out, int64_t num_blocks, int32_t format, int32_t* not_finite,
                int32_t threads) {
  using namespace gemserve;
  const Format& f = kFormats[format];
  constexpr int64_t kPiece = 1024;
  parallel_for(ceil_div(num_blocks, kPiece), threads, 1, [&](int64_t piece) {
    const int64_t end = num_blocks < (piece + 1) * kPiece ? num_blocks : (piece + 1) * kPiece;
    bool finite = true;
    for (int64_t block = piece * kPiece; block < end; ++block) {
      float* values = out + block * f.elements;
      f.expand(in + block * f.bytes, values);
      // x - x is 0 for finite x and NaN for all others.
      float sum = 0;
      for (int64_t i = 0; i < f.elements; ++i) sum += values[i] - values[i];
      finite = finite && sum == 0.0f;
    }
    if (!finite) __atomic_store_n(not_finite, 1, __ATOMIC_RELAXED);
  });
}

}  // extern "C"
