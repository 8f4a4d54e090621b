// Compiled in front of the kernels, makes their AVX-512 form run on a processor that has AVX2 alone: a
// register of 512 bits is two of 256, and each instruction that simd.h asks for is done half by half. For
// tests: what it proves is the source for 16 lanes, and with GEMSERVE_EMULATE_VNNI the one that multiplies
// bytes by VNNI. What the instructions do is Intel's Intrinsics Guide's word.
#pragma once
#include <immintrin.h>

#include <cstdint>

#define GEMSERVE_EMULATE_AVX512 1
#if defined(GEMSERVE_EMULATE_VNNI)
#define __AVX512VNNI__ 1
#endif

namespace emulated {

struct Floats {
  __m256 half[2];
};
struct Ints {
  __m256i half[2];
};
using Mask = uint32_t;  // a bit for each of 16 lanes

#define EMULATE inline __attribute__((always_inline))

EMULATE __m256i low_words(__m256i eight_ints) {  // the lower 16 bits of each, in the lower 128 bits
  const __m256i words = _mm256_and_si256(eight_ints, _mm256_set1_epi32(0xffff));
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0b1000);
}
EMULATE __m256i lanes_of(Mask mask, int half) {  // all bits of the lanes whose bit is set
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i eight = _mm256_set1_epi32(static_cast<int>(mask >> 8 * half & 0xff));
  return _mm256_cmpeq_epi32(_mm256_and_si256(eight, bits), bits);
}

#define UNARY_FLOATS(name, half_of_it)                                  \
  EMULATE Floats name(Floats a) {                                       \
    Floats result;                                                      \
    for (int i = 0; i < 2; ++i) result.half[i] = half_of_it(a.half[i]); \
    return result;                                                      \
  }
#define BINARY(Type, name, half_of_it)                                             \
  EMULATE Type name(Type a, Type b) {                                              \
    Type result;                                                                   \
    for (int i = 0; i < 2; ++i) result.half[i] = half_of_it(a.half[i], b.half[i]); \
    return result;                                                                 \
  }
#define TERNARY_FLOATS(name, half_of_it)                                                      \
  EMULATE Floats name(Floats a, Floats b, Floats c) {                                         \
    Floats result;                                                                            \
    for (int i = 0; i < 2; ++i) result.half[i] = half_of_it(a.half[i], b.half[i], c.half[i]); \
    return result;                                                                            \
  }
UNARY_FLOATS(sqrt_ps, _mm256_sqrt_ps)
BINARY(Floats, add_ps, _mm256_add_ps)
BINARY(Floats, sub_ps, _mm256_sub_ps)
BINARY(Floats, mul_ps, _mm256_mul_ps)
BINARY(Floats, div_ps, _mm256_div_ps)
BINARY(Floats, max_ps, _mm256_max_ps)
BINARY(Floats, min_ps, _mm256_min_ps)
TERNARY_FLOATS(fmadd_ps, _mm256_fmadd_ps)
TERNARY_FLOATS(fnmadd_ps, _mm256_fnmadd_ps)
BINARY(Ints, add_epi16, _mm256_add_epi16)
BINARY(Ints, add_epi32, _mm256_add_epi32)
BINARY(Ints, and_si512, _mm256_and_si256)
BINARY(Ints, andnot_si512, _mm256_andnot_si256)
BINARY(Ints, or_si512, _mm256_or_si256)
BINARY(Ints, madd_epi16, _mm256_madd_epi16)
BINARY(Ints, maddubs_epi16, _mm256_maddubs_epi16)

EMULATE Floats setzero_ps() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
EMULATE Floats set1_ps(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
EMULATE Ints set1_epi32(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
EMULATE Floats loadu_ps(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
EMULATE void storeu_ps(float* p, Floats a) {
  _mm256_storeu_ps(p, a.half[0]);
  _mm256_storeu_ps(p + 8, a.half[1]);
}
EMULATE Ints loadu_si512(const void* p) {
  const __m256i* from = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}
EMULATE Floats castsi512_ps(Ints a) {
  return {_mm256_castsi256_ps(a.half[0]), _mm256_castsi256_ps(a.half[1])};
}
EMULATE Ints castps_si512(Floats a) {
  return {_mm256_castps_si256(a.half[0]), _mm256_castps_si256(a.half[1])};
}
EMULATE __m256 castps512_ps256(Floats a) { return a.half[0]; }
EMULATE __m256 extractf32x8_ps(Floats a, int half) { return a.half[half]; }
EMULATE Floats roundscale_ps(Floats a, int) {  // 8: to the nearest integer, without exceptions
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.half[0], nearest), _mm256_round_ps(a.half[1], nearest)};
}
EMULATE Ints cvtps_epi32(Floats a) { return {_mm256_cvtps_epi32(a.half[0]), _mm256_cvtps_epi32(a.half[1])}; }
EMULATE Floats cvtepi32_ps(Ints a) { return {_mm256_cvtepi32_ps(a.half[0]), _mm256_cvtepi32_ps(a.half[1])}; }
EMULATE Ints slli_epi32(Ints a, int bits) {
  return {_mm256_slli_epi32(a.half[0], bits), _mm256_slli_epi32(a.half[1], bits)};
}
EMULATE Ints srli_epi32(Ints a, int bits) {
  return {_mm256_srli_epi32(a.half[0], bits), _mm256_srli_epi32(a.half[1], bits)};
}
EMULATE Floats cvtph_ps(__m256i halves) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
EMULATE Ints cvtepi8_epi16(__m256i bytes) {
  return {_mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes)),
          _mm256_cvtepi8_epi16(_mm256_extracti128_si256(bytes, 1))};
}
EMULATE Ints cvtepu16_epi32(__m256i words) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(words)),
          _mm256_cvtepu16_epi32(_mm256_extracti128_si256(words, 1))};
}
EMULATE __m256i cvtepi32_epi16(Ints a) {
  return _mm256_permute2x128_si256(low_words(a.half[0]), low_words(a.half[1]), 0x20);
}
EMULATE __m128i cvtsepi32_epi8(Ints a) {
  __m128i words[2];
  for (int i = 0; i < 2; ++i)
    words[i] = _mm_packs_epi32(_mm256_castsi256_si128(a.half[i]), _mm256_extracti128_si256(a.half[i], 1));
  return _mm_packs_epi16(words[0], words[1]);
}
template <int predicate>
EMULATE Mask cmp_ps_mask(Floats a, Floats b) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.half[0], b.half[0], predicate));
  const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.half[1], b.half[1], predicate));
  return static_cast<Mask>(low | high << 8);
}
EMULATE Ints mask_mov_epi32(Ints otherwise, Mask mask, Ints a) {
  Ints result;
  for (int i = 0; i < 2; ++i)
    result.half[i] = _mm256_blendv_epi8(otherwise.half[i], a.half[i], lanes_of(mask, i));
  return result;
}
EMULATE Floats maskz_mov_ps(Mask mask, Floats a) {
  Floats result;
  for (int i = 0; i < 2; ++i)
    result.half[i] = _mm256_and_ps(a.half[i], _mm256_castsi256_ps(lanes_of(mask, i)));
  return result;
}
EMULATE Ints dpwssd_epi32(Ints sum, Ints a, Ints b) { return add_epi32(sum, madd_epi16(a, b)); }
// Never saturates, unlike maddubs.
EMULATE Ints dpbusd_epi32(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
  Ints result;
  for (int i = 0; i < 2; ++i) {
    const __m256i a = unsigned_bytes.half[i], b = signed_bytes.half[i];
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(0xff)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    result.half[i] = _mm256_add_epi32(sum.half[i], _mm256_add_epi32(even, odd));
  }
  return result;
}

}  // namespace emulated

#undef _mm512_extractf32x8_ps  // without optimisation these are macros
#undef _mm512_roundscale_ps
#undef _mm512_slli_epi32
#undef _mm512_srli_epi32
#undef _mm512_cmp_ps_mask
#define __m512 emulated::Floats
#define __m512i emulated::Ints
#define _mm512_setzero_ps emulated::setzero_ps
#define _mm512_set1_ps emulated::set1_ps
#define _mm512_set1_epi32 emulated::set1_epi32
#define _mm512_loadu_ps emulated::loadu_ps
#define _mm512_storeu_ps emulated::storeu_ps
#define _mm512_loadu_si512 emulated::loadu_si512
#define _mm512_castsi512_ps emulated::castsi512_ps
#define _mm512_castps_si512 emulated::castps_si512
#define _mm512_castps512_ps256 emulated::castps512_ps256
#define _mm512_extractf32x8_ps emulated::extractf32x8_ps
#define _mm512_add_ps emulated::add_ps
#define _mm512_sub_ps emulated::sub_ps
#define _mm512_mul_ps emulated::mul_ps
#define _mm512_div_ps emulated::div_ps
#define _mm512_sqrt_ps emulated::sqrt_ps
#define _mm512_max_ps emulated::max_ps
#define _mm512_min_ps emulated::min_ps
#define _mm512_fmadd_ps emulated::fmadd_ps
#define _mm512_fnmadd_ps emulated::fnmadd_ps
#define _mm512_roundscale_ps emulated::roundscale_ps
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_add_epi16 emulated::add_epi16
#define _mm512_add_epi32 emulated::add_epi32
#define _mm512_and_si512 emulated::and_si512
#define _mm512_andnot_si512 emulated::andnot_si512
#define _mm512_or_si512 emulated::or_si512
#define _mm512_slli_epi32 emulated::slli_epi32
#define _mm512_srli_epi32 emulated::srli_epi32
#define _mm512_madd_epi16 emulated::madd_epi16
#define _mm512_maddubs_epi16 emulated::maddubs_epi16
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtepi8_epi16 emulated::cvtepi8_epi16
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtepi32_epi16 emulated::cvtepi32_epi16
#define _mm512_cvtsepi32_epi8 emulated::cvtsepi32_epi8
#define _mm512_cmp_ps_mask(a, b, predicate) emulated::cmp_ps_mask<predicate>(a, b)
#define _mm512_mask_mov_epi32 emulated::mask_mov_epi32
#define _mm512_maskz_mov_ps emulated::maskz_mov_ps
#define _mm512_dpwssd_epi32 emulated::dpwssd_epi32
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
