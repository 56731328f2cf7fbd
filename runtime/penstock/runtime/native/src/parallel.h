// Loops over XLA's own thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace penstock {

// Calls body(i) for 0 <= i < count, on the calling thread and on idle threads of the pool; returns when all
// calls have. Indices are claimed one by one, so uneven work balances; make each worth some microseconds.
//
// The caller claims too and waits only for calls that have begun: a pool whose threads are all busy delays
// nothing, and a task that comes too late finds no index left.
template <typename Body>
void ParallelFor(xla::ffi::ThreadPool& pool, int64_t count, Body&& body) {
  if (count <= 0) return;
  struct State {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
    int64_t count;
  };
  int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  auto state = std::make_shared<State>();
  state->count = count;
  // A late task must not touch `body`, which lives on the caller's stack: it only does after a claim, and the
  // caller stays until every claim is done.
  auto* call = &body;
  auto work = [state, call] {
    int64_t i;
    while ((i = state->next.fetch_add(1, std::memory_order_relaxed)) < state->count) {
      (*call)(i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t h = 0; h < helpers; ++h) pool.Schedule(decltype(work)(work));
  work();
  while (state->done.load(std::memory_order_acquire) < count) __builtin_ia32_pause();
}

// The same, but each thread first takes the indices of a range of its own in ascending order, then helps the others
// with theirs: for loops bound by reading memory, which goes faster in few long sweeps.
template <typename Body>
void ParallelSweep(xla::ffi::ThreadPool& pool, int64_t count, Body&& body) {
  const int64_t ranges = std::min<int64_t>(std::max<int64_t>(pool.num_threads(), 1), count);
  if (ranges <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };
  struct State {
    std::unique_ptr<Range[]> ranges;
    int64_t num_ranges;
    std::atomic<int64_t> workers{0};
    alignas(64) std::atomic<int64_t> done{0};
  };
  auto state = std::make_shared<State>();
  state->ranges.reset(new Range[ranges]);
  state->num_ranges = ranges;
  for (int64_t r = 0; r < ranges; ++r) {
    state->ranges[r].next = r * count / ranges;
    state->ranges[r].end = (r + 1) * count / ranges;
  }
  auto* call = &body;  // as in ParallelFor
  auto work = [state, call] {
    const int64_t own = state->workers.fetch_add(1, std::memory_order_relaxed);
    for (int64_t turn = 0; turn < state->num_ranges; ++turn) {
      Range& range = state->ranges[(own + turn) % state->num_ranges];
      int64_t i;
      while ((i = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end) {
        (*call)(i);
        state->done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  for (int64_t h = 1; h < ranges; ++h) pool.Schedule(decltype(work)(work));
  work();
  while (state->done.load(std::memory_order_acquire) < count) __builtin_ia32_pause();
}

}  // namespace penstock
