// Memory that a thread keeps between calls.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "common/limits.h"

namespace penstock {

// Returns at least `bytes` of memory, aligned to a page, which belongs to the calling thread and to this Use. It is
// valid until the thread's next call with the same Use. Throws std::bad_alloc.
template <typename Use>
char* Scratch(int64_t bytes) {
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  static thread_local std::unique_ptr<char, Free> memory;
  static thread_local int64_t size = 0;
  if (bytes > MaxScratch()) {
    throw std::bad_alloc();
  }
  if (size < bytes) {
    const int64_t rounded = (bytes + 4095) / 4096 * 4096;
    size = 0;  // the old memory is freed first; if there is none to replace it, the thread holds none
    memory.reset();
    memory.reset(static_cast<char*>(std::aligned_alloc(4096, rounded)));
    if (!memory) {
      throw std::bad_alloc();
    }
    size = rounded;
  }
  return memory.get();
}

}  // namespace penstock
