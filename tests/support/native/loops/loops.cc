// Runs loops of parallel.h that record every call, for tests/runtime/ops/native/test_native_loops.py.
#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include "common/parallel.h"

namespace {

using penstock::ParallelFor;

void WaitFor(const std::atomic<int64_t>& value, int64_t wanted) {
  while (value.load() < wanted) std::this_thread::yield();
}

}  // namespace

extern "C" {

// Adds 1 to calls[i] for each call with i, on a pool of `threads`. The first `together` calls wait for each other, so
// that as many threads take part. Returns the number of threads that took part.
int64_t run(int64_t threads, int64_t count, int64_t together, std::atomic<int32_t>* calls) {
  xla::ffi::ThreadPool pool(threads);
  std::mutex mutex;
  std::set<std::thread::id> seen;
  std::atomic<int64_t> entered{0};
  ParallelFor(pool, count, [&](int64_t i) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      seen.insert(std::this_thread::get_id());
    }
    entered.fetch_add(1);
    WaitFor(entered, together);
    calls[i].fetch_add(1);
  });
  return static_cast<int64_t>(seen.size());
}

// Runs a loop of `count` calls on two threads. One of them, the caller's if `in_caller`, throws in its first call. The
// other thread has begun a call by then, and ends it after the first has thrown. Returns 1 if the caller gets the
// exception only after all calls that had begun have ended.
int32_t fail(int64_t count, int32_t in_caller, std::atomic<int32_t>* calls) {
  xla::ffi::ThreadPool pool(2);
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int64_t> entered{0}, thrown{0}, inside{0};
  const auto body = [&](int64_t i) {
    inside.fetch_add(1);
    calls[i].fetch_add(1);
    entered.fetch_add(1);
    WaitFor(entered, 2);
    if ((std::this_thread::get_id() == caller) == static_cast<bool>(in_caller)) {
      thrown.fetch_add(1);
      inside.fetch_sub(1);
      throw std::runtime_error("of call " + std::to_string(i));
    }
    WaitFor(thrown, 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the caller must wait for this, too
    inside.fetch_sub(1);
  };
  try {
    ParallelFor(pool, count, body);
  } catch (const std::runtime_error& error) {
    return inside.load() == 0 && std::string(error.what()).rfind("of call ", 0) == 0;
  }
  return 0;
}
}
