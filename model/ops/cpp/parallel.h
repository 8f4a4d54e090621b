// Work sharing over OpenMP's threads, the same pool that torch uses: items are handed out in order, one or a few at a time, so
// that a core taken away by another process delays only its own item. What an item computes never depends on who runs it.
#pragma once

#include <atomic>
#include <cstdint>

namespace gemserve {

template <class Body>
inline void parallel_for(int64_t items, int threads, int64_t chunk, const Body& body) {
  if (threads <= 1 || items <= chunk) {
    for (int64_t i = 0; i < items; ++i) body(i);
    return;
  }
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
  for (;;) {
    const int64_t first = next.fetch_add(chunk, std::memory_order_relaxed);
    if (first >= items) break;
    const int64_t last = first + chunk < items ? first + chunk : items;
    for (int64_t i = first; i < last; ++i) body(i);
  }
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace gemserve
