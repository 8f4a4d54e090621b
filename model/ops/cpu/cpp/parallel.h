// Work sharing. Items are handed out in order, a few at a time; what an item computes never depends on who
// runs it. Unlike a parallel region of OpenMP, a call ends as soon as all items are done: it never waits for
// a helper that the operating system has not scheduled, so a core taken away by another process (or by this
// one's event loop) delays an item at most.
#pragma once

#include <cstdint>

namespace gemserve {

using ItemFunction = void (*)(const void* body, int64_t item);

// Runs function(body, i) for all i in [0, items) on at most so many threads, the caller's included. Item
// counts below 2^31.
void run_items(int64_t items, int threads, int64_t chunk, ItemFunction function, const void* body);

template <class Body>
inline void parallel_for(int64_t items, int threads, int64_t chunk, const Body& body) {
  if (threads <= 1 || items <= chunk) {
    for (int64_t i = 0; i < items; ++i) body(i);
    return;
  }
  run_items(
      items, threads, chunk, [](const void* b, int64_t i) { (*static_cast<const Body*>(b))(i); }, &body);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace gemserve
