// Huge pages for memory that a kernel is about to write.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace penstock {

constexpr uintptr_t kHugePage = 2 << 20;

// Asks Linux to back the whole huge pages of this memory with huge pages, should it not be backed yet.
//
// XLA takes large results from malloc, which takes them from the system anew for every step. The first write to each
// page then waits until the system has found and cleared it: the logits of 64 rows and 152,000 tokens have 9,500 pages
// of 4 KiB, or 19 huge ones.
inline void WantHugePages(void* data, size_t num_bytes) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + num_bytes) / kHugePage * kHugePage;
  if (begin < end) {
    // If it is refused, small pages serve too.
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
}

}  // namespace penstock
