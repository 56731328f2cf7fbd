// Huge pages for memory that a kernel is about to write.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

#include "common/common.h"

namespace penstock {

constexpr int64_t kHugePage = 2 << 20;

// From this size on, malloc takes a block from the system anew each time, and gives it back when it is freed. Smaller
// blocks it may keep (this is the most that its threshold grows to).
constexpr size_t kAlwaysFresh = 32 << 20;

// Asks Linux for huge pages for the whole huge pages of this memory. Where nothing is written yet, the first write gets
// one at once. The request outlives the array, until the memory goes back to the system.
inline void WantHugePages(void* data, size_t num_bytes) {
  const int64_t address = reinterpret_cast<int64_t>(data);
  const int64_t begin = RoundUp(address, kHugePage);
  const int64_t end = (address + static_cast<int64_t>(num_bytes)) / kHugePage * kHugePage;
  if (begin < end) {
    // If it is refused, small pages serve too.
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
}

}  // namespace penstock
