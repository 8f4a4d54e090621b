// Compiled in front of the kernels, makes their AVX-512 form run on a processor without it, through SIMDe's portable
// implementations (package libsimde-dev). For tests: it is slow.
#pragma once
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#if defined(GEMSERVE_EMULATE_VNNI)  // after SIMDe, which would take it for the processor's own
#define __AVX512VNNI__ 1
#endif

#undef _mm512_madd_epi16  // some versions alias it with the wrong number of arguments
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)
#define GEMSERVE_EMULATE_AVX512 1

// What SIMDe lacks, by halves.
#include <cstring>
static inline __m512i emulate_cvtps_epi32(__m512 x) {
  __m256 halves[2];
  __m256i results[2];
  std::memcpy(halves, &x, 64);
  for (int i = 0; i < 2; ++i) results[i] = _mm256_cvtps_epi32(halves[i]);
  __m512i result;
  std::memcpy(&result, results, 64);
  return result;
}
static inline __m512 emulate_cvtph_ps(__m256i x) {
  __m128i halves[2];
  __m256 results[2];
  std::memcpy(halves, &x, 32);
  for (int i = 0; i < 2; ++i) results[i] = _mm256_cvtph_ps(halves[i]);
  __m512 result;
  std::memcpy(&result, results, 64);
  return result;
}
static inline __m256i emulate_cvtepi32_epi16(__m512i x) {
  int wide[16];
  short narrow[16];
  std::memcpy(wide, &x, 64);
  for (int i = 0; i < 16; ++i) narrow[i] = static_cast<short>(wide[i]);
  __m256i result;
  std::memcpy(&result, narrow, 32);
  return result;
}
#define _mm512_cvtps_epi32(x) emulate_cvtps_epi32(x)
#define _mm512_cvtph_ps(x) emulate_cvtph_ps(x)
#define _mm512_cvtepi32_epi16(x) emulate_cvtepi32_epi16(x)
static inline __m512 emulate_cvtepi32_ps(__m512i x) {
  int from[16];
  float to[16];
  std::memcpy(from, &x, 64);
  for (int i = 0; i < 16; ++i) to[i] = static_cast<float>(from[i]);
  __m512 result;
  std::memcpy(&result, to, 64);
  return result;
}
static inline __m256 emulate_extractf32x8_ps(__m512 x, int half) {
  __m256 halves[2];
  std::memcpy(halves, &x, 64);
  return halves[half];
}
#define _mm512_cvtepi32_ps(x) emulate_cvtepi32_ps(x)
#define _mm512_extractf32x8_ps(x, half) emulate_extractf32x8_ps(x, half)
static inline __m512i emulate_cvtepu16_epi32(__m256i x) {
  unsigned short from[16];
  unsigned to[16];
  std::memcpy(from, &x, 32);
  for (int i = 0; i < 16; ++i) to[i] = from[i];
  __m512i result;
  std::memcpy(&result, to, 64);
  return result;
}
#define _mm512_cvtepu16_epi32(x) emulate_cvtepu16_epi32(x)
