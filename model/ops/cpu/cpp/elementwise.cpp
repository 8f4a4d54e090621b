// RMSNorm with its fusions, GeGLU, and QK-norm + rotation + cache write: one pass over memory each, float32
// inside.
#include <algorithm>
#include <cmath>

#include "kernels.h"

namespace gemserve {
namespace {

constexpr int64_t SHARED_WORK = 32768;  // elements from which on a second core is worth waking

// 1 / rms of x [size], summed in a fixed order: four vector chains, then the lanes, then the rest one by one.
template <class T>
INLINE float inverse_rms(const T* x, int64_t size, float eps) {
  vf sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * W <= size; i += 4 * W)
    for (int j = 0; j < 4; ++j) {
      const vf v = load(x + i + j * W);
      sums[j] = fma(v, v, sums[j]);
    }
  for (; i + W <= size; i += W) {
    const vf v = load(x + i);
    sums[0] = fma(v, v, sums[0]);
  }
  float total = sum_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  for (; i < size; ++i) total += widen(x[i]) * widen(x[i]);
  return 1.0f / std::sqrt(total / static_cast<float>(size) + eps);
}

template <class T>
INLINE void normalise(const T* x, const float* scale, float factor, int64_t size, T* out) {
  int64_t i = 0;
  for (; i + W <= size; i += W) store(out + i, mul(mul(load(x + i), set1(factor)), load(scale + i)));
  for (; i < size; ++i) narrow(widen(x[i]) * factor * scale[i], out + i);
}

template <class T>
void rms_norm_rows(const T* x, const float* scale, T* out, int64_t n, int64_t size, float eps, int threads) {
  parallel_for(n, n * size < SHARED_WORK ? 1 : threads, 4, [&](int64_t row) {
    normalise(x + row * size, scale, inverse_rms(x + row * size, size, eps), size, out + row * size);
  });
}

template <class T>
void norm_add_norm_rows(const T* branch, T* residual, const float* post, const float* next, T* out, int64_t n,
                        int64_t size, float eps, int threads) {
  parallel_for(n, n * size < SHARED_WORK ? 1 : threads, 4, [&](int64_t row) {
    T *to = out + row * size, *stream = residual + row * size;
    // Rounded, as is the sum.
    normalise(branch + row * size, post, inverse_rms(branch + row * size, size, eps), size, to);
    int64_t i = 0;
    for (; i + W <= size; i += W) store(stream + i, add(load(stream + i), load(to + i)));
    for (; i < size; ++i) narrow(widen(stream[i]) + widen(to[i]), stream + i);
    normalise(stream, next, inverse_rms(stream, size, eps), size, to);
  });
}

// gelu(x) = x / 2 (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
INLINE vf gelu(vf x) {
  const vf cubic = fma(mul(set1(0.044715f), mul(x, x)), x, x);
  return div(x, add(set1(1.0f), exp(mul(cubic, set1(-2.0f * 0.7978845608028654f)))));
}

template <class T>
void geglu_rows(const T* gate_up, T* out, int64_t n, int64_t size, int threads) {
  constexpr int64_t PIECE = 1024;
  const int64_t pieces = ceil_div(size, PIECE);
  parallel_for(n * pieces, n * size < SHARED_WORK / 8 ? 1 : threads, 1, [&](int64_t item) {
    const int64_t row = item / pieces, first = item % pieces * PIECE, last = std::min(size, first + PIECE);
    const T *gate = gate_up + row * 2 * size, *up = gate + size;
    T* to = out + row * size;
    int64_t i = first;
    for (; i + W <= last; i += W) store(to + i, mul(gelu(load(gate + i)), load(up + i)));
    for (; i < last; ++i) {
      alignas(64) float lanes[W];
      store(lanes, gelu(set1(widen(gate[i]))));
      narrow(lanes[0] * widen(up[i]), to + i);
    }
  });
}

}  // namespace

namespace {

template <class In, class Out>
INLINE void norm_rotate(const In* x, const float* scale, const float* cos, const float* sin, int64_t head_dim,
                        float eps, Out* out) {
  const vf factor = set1(inverse_rms(x, head_dim, eps));
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; i += W) {
    const vf first = mul(mul(load(x + i), factor), load(scale + i));
    const vf second = mul(mul(load(x + half + i), factor), load(scale + half + i));
    const vf c = load(cos + i), s = load(sin + i);
    store(out + i, sub(mul(first, c), mul(second, s)));
    store(out + half + i, add(mul(second, c), mul(first, s)));
  }
}

template <class T, class Cache>
void norm_rotate_write(const RopeArguments& a) {
  const int64_t heads = a.num_heads + 2 * a.kv_heads, half = a.head_dim / 2;
  const int threads = a.n * heads * a.head_dim < SHARED_WORK ? 1 : static_cast<int>(a.threads);
  parallel_for(a.n, threads, 4, [&](int64_t token) {
    const T* from = static_cast<const T*>(a.qkv) + token * heads * a.head_dim;
    const float *cos = a.cos + token * half, *sin = a.sin + token * half;
    const int64_t block = a.slots[token] / a.block_size, place = a.slots[token] % a.block_size;
    T* query = static_cast<T*>(a.query) + token * a.num_heads * a.head_dim;
    Cache* key = static_cast<Cache*>(a.k_cache) + block * a.k_block_stride + place * a.k_slot_stride;
    Cache* value = static_cast<Cache*>(a.v_cache) + block * a.v_block_stride + place * a.v_slot_stride;
    for (int64_t h = 0; h < a.num_heads; ++h, from += a.head_dim)
      norm_rotate(from, a.q_scale, cos, sin, a.head_dim, static_cast<float>(a.eps), query + h * a.head_dim);
    for (int64_t h = 0; h < a.kv_heads; ++h, from += a.head_dim)
      norm_rotate(from, a.k_scale, cos, sin, a.head_dim, static_cast<float>(a.eps), key + h * a.head_dim);
    for (int64_t i = 0; i < a.kv_heads * a.head_dim; i += W) store(value + i, load(from + i));
  });
}

}  // namespace
}  // namespace gemserve

using namespace gemserve;

extern "C" {

void rms_norm(const void* x, const float* scale, void* out, int64_t n, int64_t size, float eps,
              int32_t is_bf16, int32_t threads) {
  if (is_bf16)
    rms_norm_rows(static_cast<const bf16*>(x), scale, static_cast<bf16*>(out), n, size, eps, threads);
  else
    rms_norm_rows(static_cast<const float*>(x), scale, static_cast<float*>(out), n, size, eps, threads);
}

void norm_add_norm(const void* branch, void* residual, const float* post, const float* next, void* out,
                   int64_t n, int64_t size, float eps, int32_t is_bf16, int32_t threads) {
  if (is_bf16)
    norm_add_norm_rows(static_cast<const bf16*>(branch), static_cast<bf16*>(residual), post, next,
                       static_cast<bf16*>(out), n, size, eps, threads);
  else
    norm_add_norm_rows(static_cast<const float*>(branch), static_cast<float*>(residual), post, next,
                       static_cast<float*>(out), n, size, eps, threads);
}

void geglu(const void* gate_up, void* out, int64_t n, int64_t size, int32_t is_bf16, int32_t threads) {
  if (is_bf16)
    geglu_rows(static_cast<const bf16*>(gate_up), static_cast<bf16*>(out), n, size, threads);
  else
    geglu_rows(static_cast<const float*>(gate_up), static_cast<float*>(out), n, size, threads);
}

void qk_norm_rope_cache_write(const RopeArguments* arguments) {
  if (arguments->is_bf16)
    norm_rotate_write<bf16, bf16>(*arguments);
  else if (arguments->cache_is_bf16)
    norm_rotate_write<float, bf16>(*arguments);
  else
    norm_rotate_write<float, float>(*arguments);
}

}  // extern "C"
