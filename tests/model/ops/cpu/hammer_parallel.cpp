// Two threads share work out at the same time, thousands of times, with every item checked: built with the
// thread sanitizer, this looks for races in the pool of helpers (tests/model/ops/cpu/test_parallel.py).
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "parallel.h"

static void hammer(int rounds, unsigned state) {
  for (int round = 0; round < rounds; ++round) {
    state = state * 1103515245 + 12345;
    const int64_t items = (state >> 16) % 200 + 2, chunk = (state >> 8) % 3 + 1;
    std::vector<int> visits(items, 0);
    gemserve::parallel_for(items, (state >> 4) % 4 + 1, chunk,
                           [&](int64_t i) { visits[i] += static_cast<int>(i) + 1; });
    for (int64_t i = 0; i < items; ++i)
      if (visits[i] != i + 1) std::abort();
    // Long enough for helpers to sleep.
    if (round % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

int main() {
  std::thread one(hammer, 3000, 1), two(hammer, 3000, 2);
  one.join();
  two.join();
  std::puts("every item once");
}
