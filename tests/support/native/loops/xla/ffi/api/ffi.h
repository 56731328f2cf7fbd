// The part of XLA that parallel.h uses, on plain threads, so that a loop can run on as many threads as a test wants.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace xla::ffi {

class ThreadPool {
 public:
  explicit ThreadPool(int64_t threads) : threads_(threads) {}
  ~ThreadPool() {
    for (std::thread& thread : started_) thread.join();
  }

  template <typename F>
  void Schedule(F&& task) {
    started_.emplace_back(std::forward<F>(task));
  }

  int64_t num_threads() const { return threads_; }

 private:
  int64_t threads_;
  std::vector<std::thread> started_;
};

}  // namespace xla::ffi
