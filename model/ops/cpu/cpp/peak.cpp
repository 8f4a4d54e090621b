// The arithmetic of the linear kernels without their memory, to measure what the processor is able to.
#include "linear.h"

namespace gemserve {
namespace {

// What an accumulator of each kernel adds: products of float32 (linear.cpp), of pairs of int16 (int8.cpp) and
// of quads of bytes (few_bits.h). Each begins with something else, or the compiler would make them one.
struct FloatProducts {
  static constexpr int64_t EACH = W;
  vf sum;
  INLINE void start(int from) { sum = set1(static_cast<float>(from)); }
  INLINE void add(vf inputs) { sum = fma(inputs, set1(1.0f), sum); }
  INLINE vf result() const { return sum; }
};
struct PairProducts {
  static constexpr int64_t EACH = 2 * W;
  vi sum;
  INLINE void start(int from) { sum = set1i(from); }
  INLINE void add(vf inputs) { sum = pair_dot(sum, as_int(inputs), set1i(0x00010001)); }
  INLINE vf result() const { return as_float(sum); }
};
struct ByteProducts {
  static constexpr int64_t EACH = 4 * W;
  ByteSum sum;
  INLINE void start(int from) { sum.start(set1i(from)); }
  INLINE void add(vf inputs) { sum.add(set1i(0x01010101), as_int(inputs)); }
  INLINE vf result() const { return as_float(sum.times(1)); }
};

template <class Products>
int64_t multiply(int64_t items, int64_t rounds, int32_t threads) {
  constexpr int SUMS = 12;  // so many that none waits for itself, and registers for all of them
  parallel_for(items, threads, 1, [&](int64_t) {
    Products sums[SUMS];
#pragma GCC unroll 12
    for (int s = 0; s < SUMS; ++s) sums[s].start(s);
    vf inputs = zero();
    for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
      for (int s = 0; s < SUMS; ++s) {
        inputs = in_register(inputs);  // for all the compiler knows, they are others now
        sums[s].add(inputs);
      }
    }
    alignas(64) float results[SUMS * W];
#pragma GCC unroll 12
    for (int s = 0; s < SUMS; ++s) store(results + s * W, sums[s].result());
    asm volatile("" : : "r"(results) : "memory");  // and may be looked at
  });
  return items * rounds * SUMS * Products::EACH;
}

}  // namespace
}  // namespace gemserve

// As the kernel for weights of this kind multiplies, in items that the threads share as they share those of a
// kernel. Returns the number of products.
extern "C" int64_t multiply_in_registers(int32_t kind, int64_t items, int64_t rounds, int32_t threads) {
  using namespace gemserve;
  if (kind == kFewBits) return multiply<ByteProducts>(items, rounds, threads);
  if (kind == kInt8) return multiply<PairProducts>(items, rounds, threads);
  return multiply<FloatProducts>(items, rounds, threads);
}
