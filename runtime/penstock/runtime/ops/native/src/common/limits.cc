#include "common/limits.h"

#include <atomic>

namespace penstock {
namespace {

std::atomic<int64_t> threads{INT64_MAX};
std::atomic<int64_t> scratch{INT64_MAX};

}  // namespace

int64_t MaxThreads() { return threads.load(std::memory_order_relaxed); }

int64_t MaxScratch() { return scratch.load(std::memory_order_relaxed); }

}  // namespace penstock

__attribute__((visibility("default"))) void penstock_limit_threads(int64_t threads) {
  penstock::threads.store(threads);
}

__attribute__((visibility("default"))) void penstock_limit_scratch(int64_t bytes) { penstock::scratch.store(bytes); }
