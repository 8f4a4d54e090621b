// Kernels that decoder_layers (layer.cpp) calls besides their being called one by one, and the records that
// they take. The records are laid out as the caller packs them (model/ops/cpu/records.py): 64-bit fields
// only.
#pragma once

#include <cstdint>

#include "attention.h"
#include "linear.h"

struct RopeArguments {
  const void* qkv;  // [n, num_heads + 2 kv_heads, head_dim]
  const float* q_scale;
  const float* k_scale;
  const float* cos;  // [n, head_dim / 2]
  const float* sin;
  void* query;  // [n, num_heads, head_dim]
  void* k_cache;
  void* v_cache;
  const int64_t* slots;  // [n]
  int64_t n, num_heads, kv_heads, head_dim, block_size;
  int64_t k_block_stride, k_slot_stride, v_block_stride, v_slot_stride;  // in elements
  int64_t is_bf16, cache_is_bf16, threads;  // bfloat16 activations come with a bfloat16 cache
  double eps;
};
static_assert(sizeof(RopeArguments) == 22 * 8, "change model/ops/cpu/records.py, too");

extern "C" {

// x [m, k] (contiguous) times weight transposed -> out [m, n] (contiguous).
void linear(const gemserve::PackedWeight* weight, const void* x, int32_t x_bf16, int64_t m, void* out,
            int32_t out_bf16, int32_t threads);
void norm_add_norm(const void* branch, void* residual, const float* post, const float* next, void* out,
                   int64_t n, int64_t size, float eps, int32_t is_bf16, int32_t threads);
void geglu(const void* gate_up, void* out, int64_t n, int64_t size, int32_t is_bf16, int32_t threads);
void qk_norm_rope_cache_write(const RopeArguments* arguments);
void paged_attention(const gemserve::AttentionArguments* arguments);

}  // extern "C"
