// All decoder blocks in one call: the very kernels that can be called one by one, in the order of
// model/network/gemma3.py, so that a small batch does not pay the caller's way in and out nine times per
// layer.
#include "kernels.h"

using namespace gemserve;

// What stays the same from step to step. Field by field as in model/ops/cpu/records.py: 64-bit fields only.
struct LayerArguments {
  const PackedWeight *qkv, *attention_output, *gate_up, *down;
  const float *q_scale, *k_scale;                                           // [head_dim]
  const float *post_attention, *pre_feedforward, *post_feedforward, *next;  // [hidden_size]
  void *k_cache, *v_cache;
  int64_t k_block_stride, k_slot_stride, v_block_stride, v_slot_stride;  // in elements
  int64_t hidden_size, intermediate_size, num_heads, kv_heads, head_dim;
  int64_t is_global, is_bf16, cache_is_bf16;
  double eps, scale;
};
static_assert(sizeof(LayerArguments) == 26 * 8, "change model/ops/cpu/records.py, too");

// One step's batch, the same for all global layers, or for all others.
struct StepArguments {
  void *hidden, *residual;  // [n, hidden_size], updated in place
  // Room for n times the largest of: qkv, attended, gate_up, a branch; and of: query, activations, a branch.
  void *first, *second;
  const float *cos, *sin;  // [n, head_dim / 2]
  const int64_t* slots;    // [n]
  const int32_t *block_table, *query_start, *context_lens;
  int64_t n, num_seqs, table_stride, block_size, window, threads;
};
static_assert(sizeof(StepArguments) == 16 * 8, "change model/ops/cpu/records.py, too");

static void decoder_layer(const LayerArguments& l, const StepArguments& s) {
  const int32_t is_bf16 = static_cast<int32_t>(l.is_bf16), threads = static_cast<int32_t>(s.threads);
  const float eps = static_cast<float>(l.eps);
  linear(l.qkv, s.hidden, is_bf16, s.n, s.first, is_bf16, threads);
  // clang-format off
  const RopeArguments rope{
      s.first, l.q_scale, l.k_scale, s.cos, s.sin, s.second, l.k_cache, l.v_cache, s.slots,
      s.n, l.num_heads, l.kv_heads, l.head_dim, s.block_size,
      l.k_block_stride, l.k_slot_stride, l.v_block_stride, l.v_slot_stride,
      l.is_bf16, l.cache_is_bf16, s.threads, l.eps};
  // clang-format on
  qk_norm_rope_cache_write(&rope);
  // clang-format off
  const AttentionArguments attention{
      s.second, l.k_cache, l.v_cache, s.first, s.block_table, s.query_start, s.context_lens,
      s.num_seqs, s.table_stride, s.block_size, l.num_heads, l.kv_heads, l.head_dim,
      l.k_block_stride, l.k_slot_stride, l.v_block_stride, l.v_slot_stride,
      s.window, l.is_bf16, l.cache_is_bf16, s.threads, l.scale};
  // clang-format on
  paged_attention(&attention);
  linear(l.attention_output, s.first, is_bf16, s.n, s.second, is_bf16, threads);
  norm_add_norm(s.second, s.residual, l.post_attention, l.pre_feedforward, s.hidden, s.n, l.hidden_size, eps,
                is_bf16, threads);
  linear(l.gate_up, s.hidden, is_bf16, s.n, s.first, is_bf16, threads);
  geglu(s.first, s.second, s.n, l.intermediate_size, is_bf16, threads);
  linear(l.down, s.second, is_bf16, s.n, s.first, is_bf16, threads);
  norm_add_norm(s.first, s.residual, l.post_feedforward, l.next, s.hidden, s.n, l.hidden_size, eps, is_bf16,
                threads);
}

// ``steps``: of layers with a window, and of global ones.
extern "C" void decoder_layers(const LayerArguments* layers, int64_t count, const StepArguments* steps) {
  for (int64_t i = 0; i < count; ++i) decoder_layer(layers[i], steps[layers[i].is_global]);
}

// Bytes of the records, in the order of RECORDS in model/ops/cpu/records.py.
extern "C" int64_t record_size(int32_t index) {
  constexpr int64_t sizes[] = {sizeof(AttentionArguments), sizeof(RopeArguments), sizeof(LayerArguments),
                               sizeof(StepArguments), sizeof(PackedWeight)};
  return index < 0 || index >= 5 ? 0 : sizes[index];
}
