// A thin SIMD layer: the kernels are written once over it and compiled for AVX2 (8 floats) or AVX-512 (16
// floats). Only explicit fma() fuses; the sources are compiled with -ffp-contract=off, so that the same
// arithmetic gives the same bits wherever it stands. bfloat16 is storage only: every sum is float32.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace gemserve {

struct bf16 {
  uint16_t bits;
};

#define INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__) || defined(GEMSERVE_EMULATE_AVX512)
#define GEMSERVE_WIDE 1
#endif

#if defined(GEMSERVE_WIDE)

using vf = __m512;
using vi = __m512i;
constexpr int W = 16;

INLINE vf zero() { return _mm512_setzero_ps(); }
INLINE vf set1(float x) { return _mm512_set1_ps(x); }
INLINE vi set1i(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vf load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, vf v) { _mm512_storeu_ps(p, v); }
INLINE vi loadi(const void* p) { return _mm512_loadu_si512(p); }
INLINE vf as_float(vi v) { return _mm512_castsi512_ps(v); }
INLINE vi as_int(vf v) { return _mm512_castps_si512(v); }
INLINE vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf sqrt(vf a) { return _mm512_sqrt_ps(a); }
INLINE vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE vf round(vf a) { return _mm512_roundscale_ps(a, 8); }
INLINE vi to_int(vf a) { return _mm512_cvtps_epi32(a); }
INLINE vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
INLINE vi addi(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi andi(vi a, vi b) { return _mm512_and_si512(a, b); }
template <int bits>
INLINE vi shift_left(vi a) {
  return _mm512_slli_epi32(a, bits);
}
template <int bits>
INLINE vi shift_right(vi a) {
  return _mm512_srli_epi32(a, bits);
}
INLINE vi ori(vi a, vi b) { return _mm512_or_si512(a, b); }
INLINE vi and_not(vi mask, vi a) { return _mm512_andnot_si512(mask, a); }
INLINE vf load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
INLINE void store_int8(int8_t* p, vi v) {  // saturated
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(v));
}
INLINE vf load(const bf16* p) {
  return as_float(
      shift_left<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))));
}
INLINE void store(bf16* p, vf v) {  // round to nearest even; NaN stays NaN
  const vi bits = as_int(v);
  vi up = addi(addi(bits, set1i(0x7fff)), andi(shift_right<16>(bits), set1i(1)));
  up = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), set1i(0x7fc00000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(shift_right<16>(up)));
}
INLINE uint32_t greater_mask(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INLINE uint32_t equal_mask(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
INLINE vf zero_where_less(vf value, vf a, vf b) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), value);
}
INLINE __m256 low_half(vf v) { return _mm512_castps512_ps256(v); }
INLINE __m256 high_half(vf v) { return _mm512_extractf32x8_ps(v, 1); }
INLINE __m256 half_sum(vf v) { return _mm256_add_ps(low_half(v), high_half(v)); }
INLINE __m256 half_max(vf v) { return _mm256_max_ps(low_half(v), high_half(v)); }
INLINE vi load_int8_as_int16(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
INLINE vi pair_dot(vi sum, vi a, vi b) {  // each lane: sum + a.low * b.low + a.high * b.high, int16 factors
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sum, a, b);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
// Unsigned a, signed b; sums of two, int16.
INLINE vi byte_pairs(vi a, vi b) { return _mm512_maddubs_epi16(a, b); }
INLINE vi add_words(vi a, vi b) { return _mm512_add_epi16(a, b); }
INLINE vi word_pairs(vi a, vi b) { return _mm512_madd_epi16(a, b); }

#else

using vf = __m256;
using vi = __m256i;
constexpr int W = 8;

INLINE vf zero() { return _mm256_setzero_ps(); }
INLINE vf set1(float x) { return _mm256_set1_ps(x); }
INLINE vi set1i(int32_t x) { return _mm256_set1_epi32(x); }
INLINE vf load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, vf v) { _mm256_storeu_ps(p, v); }
INLINE vi loadi(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
INLINE vf as_float(vi v) { return _mm256_castsi256_ps(v); }
INLINE vi as_int(vf v) { return _mm256_castps_si256(v); }
INLINE vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf sqrt(vf a) { return _mm256_sqrt_ps(a); }
INLINE vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf fnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE vf round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vi to_int(vf a) { return _mm256_cvtps_epi32(a); }
INLINE vf to_float(vi a) { return _mm256_cvtepi32_ps(a); }
INLINE vi addi(vi a, vi b) { return _mm256_add_epi32(a, b); }
INLINE vi andi(vi a, vi b) { return _mm256_and_si256(a, b); }
template <int bits>
INLINE vi shift_left(vi a) {
  return _mm256_slli_epi32(a, bits);
}
template <int bits>
INLINE vi shift_right(vi a) {
  return _mm256_srli_epi32(a, bits);
}
INLINE vi ori(vi a, vi b) { return _mm256_or_si256(a, b); }
INLINE vi and_not(vi mask, vi a) { return _mm256_andnot_si256(mask, a); }
INLINE vf load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
INLINE void store_int8(int8_t* p, vi v) {  // saturated
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
INLINE vf load(const bf16* p) {
  return as_float(
      shift_left<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
}
INLINE void store(bf16* p, vf v) {  // round to nearest even; NaN stays NaN
  const vi bits = as_int(v);
  vi up = addi(addi(bits, set1i(0x7fff)), andi(shift_right<16>(bits), set1i(1)));
  up = as_int(_mm256_blendv_ps(as_float(up), as_float(set1i(0x7fc00000)), _mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
  up = shift_right<16>(up);
  const vi packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(up, up), 0b1000);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
INLINE uint32_t greater_mask(vf a, vf b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
INLINE uint32_t equal_mask(vf a, vf b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
INLINE vf zero_where_less(vf value, vf a, vf b) {
  return _mm256_and_ps(value, _mm256_cmp_ps(a, b, _CMP_NLT_UQ));
}
INLINE __m256 half_sum(vf v) { return v; }
INLINE __m256 half_max(vf v) { return v; }
INLINE vi load_int8_as_int16(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
INLINE vi pair_dot(vi sum, vi a, vi b) {  // each lane: sum + a.low * b.low + a.high * b.high, int16 factors
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}
// Unsigned a, signed b; sums of two, int16.
INLINE vi byte_pairs(vi a, vi b) { return _mm256_maddubs_epi16(a, b); }
INLINE vi add_words(vi a, vi b) { return _mm256_add_epi16(a, b); }
INLINE vi word_pairs(vi a, vi b) { return _mm256_madd_epi16(a, b); }

#endif

struct ByteSum {  // per lane of 32 bits: a start, plus products of four unsigned with four signed bytes
#if defined(GEMSERVE_WIDE) && defined(__AVX512VNNI__)
  vi lanes;
  static int32_t start_of(int32_t first_two, int32_t last_two) { return first_two + last_two; }
  INLINE void start(vi from) { lanes = from; }
  INLINE void add(vi weights, vi inputs) { lanes = _mm512_dpbusd_epi32(lanes, weights, inputs); }
  INLINE vi times(int factor) const { return factor == 16 ? shift_left<4>(lanes) : lanes; }
#else
  vi words;  // two a lane; what they come to in the end must be in int16
  static int32_t start_of(int32_t first_two, int32_t last_two) {
    return static_cast<int32_t>(static_cast<uint32_t>(last_two) << 16 |
                                (static_cast<uint32_t>(first_two) & 0xffff));
  }
  INLINE void start(vi from) { words = from; }
  INLINE void add(vi weights, vi inputs) {
    words = add_words(words, byte_pairs(weights, inputs));
#if !defined(GEMSERVE_EMULATE_AVX512)
    asm(""
        : "+v"(words));  // the compiler would rather multiply all, put the products on the stack, and add
                         // them up in a tree
#endif
  }
  INLINE vi times(int factor) const { return word_pairs(words, set1i(factor << 16 | factor)); }
#endif
};

INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
// Keeps a loaded value in a register: the compiler would rather load it again for each use.
INLINE vf in_register(vf v) {
#if !defined(GEMSERVE_EMULATE_AVX512)
  asm("" : "+v"(v));
#endif
  return v;
}

// 2 W values: of float32 W after W; of bfloat16 the even ones and the odd ones, for that takes half the
// instructions. Packed weights lie so that both are in order; what attention multiplies by keys, and what it
// adds up of values, takes on that order: in_cache_order, in_head_order.
INLINE void load_two(const float* p, vf& first, vf& second) {
  first = load(p);
  second = load(p + W);
}
INLINE void load_two(const bf16* p, vf& first, vf& second) {
  const vi both = loadi(p);
  first = as_float(shift_left<16>(both));
  second = as_float(andi(both, set1i(static_cast<int32_t>(0xffff0000))));
}
INLINE void in_cache_order(float*, int64_t, const float*) {}
INLINE void in_cache_order(float* x, int64_t n, const bf16*) {
  float from[2 * W];
  for (; n > 0; n -= 2 * W, x += 2 * W) {
    std::memcpy(from, x, sizeof from);
    for (int i = 0; i < W; ++i) x[i] = from[2 * i], x[W + i] = from[2 * i + 1];
  }
}
INLINE void in_head_order(float*, int64_t, const float*) {}
INLINE void in_head_order(float* x, int64_t n, const bf16*) {
  float from[2 * W];
  for (; n > 0; n -= 2 * W, x += 2 * W) {
    std::memcpy(from, x, sizeof from);
    for (int i = 0; i < W; ++i) x[2 * i] = from[i], x[2 * i + 1] = from[W + i];
  }
}

INLINE float widen(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}
INLINE float widen(float x) { return x; }
INLINE void narrow(float x, float* to) { *to = x; }
INLINE void narrow(float x, bf16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  to->bits = x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float sum_lanes(vf v) {
  const __m256 half = half_sum(v);
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
INLINE float max_lanes(vf v) {
  const __m256 half = half_max(v);
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

// e^x in float32, about 1 unit in the last place: Cody-Waite reduction and the polynomial of Cephes' expf.
// Below -87.3 the result is 0 (a product with a subnormal could depend on the machine's mode), above 88.3 it
// is clamped. NaN stays NaN.
INLINE vf exp(vf x) {
  // A NaN in the second operand passes through both.
  const vf clamped = min(set1(88.3f), max(set1(-87.3f), x));
  const vf n = round(mul(clamped, set1(1.44269504088896341f)));
  vf r = fnma(n, set1(0.693359375f), clamped);
  r = fnma(n, set1(-2.12194440e-4f), r);
  vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  const vf scale = as_float(shift_left<23>(addi(to_int(n), set1i(127))));
  return zero_where_less(mul(p, scale), x, set1(-87.3f));
}
INLINE float exp(float x) {
  alignas(64) float lanes[W];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

}  // namespace gemserve
