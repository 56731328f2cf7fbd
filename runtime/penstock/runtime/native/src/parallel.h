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

}  // namespace penstock
