// Threads of XLA's pool that stay awake between one loop and the next.
//
// A step is some hundred loops of 0.1 to 0.4 ms. Waking a thread for each costs 0.05 to 0.15 ms on a virtual machine,
// so a helper that finds no more work looks for the next loop for a short while before it gives its thread back.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>

namespace penstock {

// Work that any number of threads may share; Work returns when there is nothing left to begin.
struct Task {
  virtual ~Task() = default;
  virtual void Work() = 0;
};

class Team {
 public:
  static Team& Get() {
    static Team* team = new Team;  // never destroyed: threads of the pool may outlive static objects
    return *team;
  }

  // Offers `task` to the helpers, in place of the task before, whose caller does what is left of it. Returns how many
  // more helpers must be sent to Serve to have `wanted` of them.
  int64_t Post(std::shared_ptr<Task> task, int64_t wanted) {
    std::lock_guard<std::mutex> lock(mutex_);
    task_ = std::move(task);
    number_.fetch_add(1, std::memory_order_release);
    const int64_t missing = wanted > helpers_ ? wanted - helpers_ : 0;
    helpers_ += missing;
    return missing;
  }

  // Runs a helper: it works on tasks until none comes for a while.
  void Serve() {
    uint64_t seen = 0;
    for (;;) {
      std::shared_ptr<Task> task;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        const uint64_t number = number_.load(std::memory_order_relaxed);
        if (number == seen) {  // checked under the lock, so that each post counts this helper or sends another one
          --helpers_;
          return;
        }
        seen = number;
        task = task_;
      }
      task->Work();
      task.reset();
      const auto until = std::chrono::steady_clock::now() + kPatience;
      while (number_.load(std::memory_order_acquire) == seen && std::chrono::steady_clock::now() < until) {
        for (int i = 0; i < 32; ++i) {
          __builtin_ia32_pause();
        }
      }
    }
  }

 private:
  static constexpr std::chrono::microseconds kPatience{200};

  std::mutex mutex_;
  std::shared_ptr<Task> task_;
  std::atomic<uint64_t> number_{0};
  int64_t helpers_ = 0;  // helpers that were sent to Serve and have not left it
};

}  // namespace penstock
