// Loops over XLA's own thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <type_traits>
#include <utility>

#include "common/limits.h"
#include "common/team.h"
#include "xla/ffi/api/ffi.h"

namespace penstock {

constexpr int kSpins = 4096;  // some 0.1 to 0.2 ms

// How many threads a loop over the pool runs on, including its caller's: at least 1.
inline int64_t NumThreads(const xla::ffi::ThreadPool& pool) {
  return std::max<int64_t>(1, std::min(pool.num_threads(), MaxThreads()));
}

// Calls body(i) for 0 <= i < count, on the calling thread and on threads of the pool. Returns when all calls have
// returned. Each call should be worth some microseconds.
//
// Each thread first takes the indices of a range of its own in ascending order, then helps other threads with theirs.
// So memory is read in few long sweeps, and uneven work is balanced. The caller waits only for calls that have begun: a
// pool whose threads are all busy delays nothing, and a helper that comes too late finds no index left.
//
// If a call throws, on whichever thread, the caller gets that exception (the first, if there are several) once all
// calls that have begun are done. Calls that have not begun are left out.
template <typename Body>
void ParallelFor(xla::ffi::ThreadPool& pool, int64_t count, Body&& body) {
  const int64_t ranges = std::min(NumThreads(pool), count);
  if (ranges <= 1) {
    for (int64_t i = 0; i < count; ++i) {
      body(i);
    }
    return;
  }
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };
  struct Loop : Task {
    std::unique_ptr<Range[]> ranges;
    int64_t num_ranges;
    std::atomic<int64_t> workers{0};
    alignas(64) std::atomic<int64_t> done{0};
    // The body lives on the caller's stack. It is called only after a claim, and the caller stays until every claim is
    // done.
    std::remove_reference_t<Body>* body;
    std::atomic<bool> failed{false};
    std::exception_ptr error;  // written by the thread that set `failed`, before its call counts as done

    void Work() override {
      const int64_t own = workers.fetch_add(1, std::memory_order_relaxed);
      for (int64_t turn = 0; turn < num_ranges; ++turn) {
        Range& range = ranges[(own + turn) % num_ranges];
        int64_t i;
        while ((i = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end) {
          Call(i);
          done.fetch_add(1, std::memory_order_release);
        }
      }
    }

    void Call(int64_t i) {
      if (failed.load(std::memory_order_relaxed)) {
        return;
      }
      try {
        (*body)(i);
      } catch (...) {
        if (!failed.exchange(true, std::memory_order_relaxed)) {
          error = std::current_exception();
        }
      }
    }
  };
  auto loop = std::make_shared<Loop>();
  loop->ranges.reset(new Range[ranges]);
  loop->num_ranges = ranges;
  loop->body = &body;
  for (int64_t r = 0; r < ranges; ++r) {
    loop->ranges[r].next = r * count / ranges;
    loop->ranges[r].end = (r + 1) * count / ranges;
  }
  const int64_t missing = Team::Get().Post(loop, ranges - 1);
  for (int64_t h = 0; h < missing; ++h) {
    pool.Schedule([] { Team::Get().Serve(); });
  }
  loop->Work();
  // The calls that are left take other threads some microseconds. If they take long, such a thread may be waiting for a
  // processor, perhaps this one: a machine may have fewer to spare than there are threads.
  for (int turns = 0; loop->done.load(std::memory_order_acquire) < count; ++turns) {
    if (turns < kSpins) {
      __builtin_ia32_pause();
    } else {
      std::this_thread::yield();
    }
  }
  if (loop->error) {
    std::rethrow_exception(loop->error);
  }
}

}  // namespace penstock
