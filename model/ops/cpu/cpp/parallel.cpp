// The helpers' side of parallel.h: a pool that lives as long as the process.
//
// One 64-bit word, the cursor, holds the number of the current job (upper half) and its next item (lower
// half). Claiming items is a compare-and-swap on it, so a claim succeeds only while the job it was meant for
// is current; and a job stays current, its fields and the caller's stack valid, until every claimed item is
// done. Between jobs the cursor is closed before the fields change.
#include "parallel.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <x86intrin.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

namespace gemserve {
namespace {

constexpr uint64_t CLOSED = 0xffffffff;
// About 50 microseconds: the next operation of a step usually comes within.
constexpr uint64_t SPIN_CYCLES = 100'000;
constexpr uint64_t YIELD_CYCLES = 1'000'000;  // then let others run for half a millisecond, then sleep

class Pool {
 public:
  bool try_run(int64_t items, int threads, int64_t chunk, ItemFunction function, const void* body) {
    std::unique_lock<std::mutex> lock(busy, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    while (num_helpers < threads - 1) std::thread(&Pool::help, this, num_helpers++).detach();
    const uint64_t job = (cursor.load() >> 32) + 1;
    cursor.store(job << 32 | CLOSED);
    item_count.store(items);
    chunk_size.store(chunk);
    max_helpers.store(threads - 1);
    item_function.store(function);
    item_body.store(body);
    pending.store(items);
    cursor.store(job << 32);
    epoch.fetch_add(1);
    if (sleepers.load() > 0) syscall(SYS_futex, &epoch, FUTEX_WAKE_PRIVATE, threads - 1, nullptr, nullptr, 0);
    work();
    // Items that helpers are in the middle of.
    for (const uint64_t start = __rdtsc(); pending.load() > 0;) {
      if (__rdtsc() - start < SPIN_CYCLES)
        _mm_pause();
      else
        sched_yield();
    }
    cursor.store(job << 32 | CLOSED);
    return true;
  }

 private:
  std::mutex busy;
  int num_helpers = 0;
  alignas(64) std::atomic<uint64_t> cursor{CLOSED};
  std::atomic<int64_t> item_count{0}, chunk_size{1};
  std::atomic<int> max_helpers{0};
  std::atomic<ItemFunction> item_function{nullptr};
  std::atomic<const void*> item_body{nullptr};
  alignas(64) std::atomic<int64_t> pending{0};
  alignas(64) std::atomic<uint32_t> epoch{0};
  std::atomic<int> sleepers{0};

  void work() {
    for (;;) {
      uint64_t seen = cursor.load();
      const int64_t next = static_cast<int64_t>(seen & CLOSED), items = item_count.load(),
                    chunk = chunk_size.load();
      const ItemFunction function = item_function.load();
      const void* body = item_body.load();
      if ((seen & CLOSED) == CLOSED || next >= items) return;
      // Less and less, so that threads end together.
      const int64_t share = (items - next) / (4 * (max_helpers.load() + 1));
      const int64_t last = std::min(items, next + std::max(chunk, share));
      if (!cursor.compare_exchange_strong(seen, (seen & ~CLOSED) | static_cast<uint64_t>(last))) continue;
      for (int64_t i = next; i < last; ++i) function(body, i);
      pending.fetch_sub(last - next);
    }
  }

  void help(int index) {
    uint32_t seen = epoch.load() - 1;  // a job may already wait
    for (;;) {
      const uint64_t start = __rdtsc();
      for (uint64_t waited = 0; epoch.load() == seen; waited = __rdtsc() - start) {
        if (waited < SPIN_CYCLES) {
          _mm_pause();
        } else if (waited < YIELD_CYCLES) {
          sched_yield();
        } else {
          sleepers.fetch_add(1);
          // Returns at once if a job has come.
          syscall(SYS_futex, &epoch, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
          sleepers.fetch_sub(1);
        }
      }
      seen = epoch.load();
      if (index < max_helpers.load()) work();
    }
  }
};

}  // namespace

void run_items(int64_t items, int threads, int64_t chunk, ItemFunction function, const void* body) {
  static Pool* pool = new Pool;  // never destroyed: helpers may look at it until the process ends
  if (pool->try_run(items, threads, chunk, function, body)) return;
  // Another thread of this process is using the helpers.
  for (int64_t i = 0; i < items; ++i) function(body, i);
}

}  // namespace gemserve
