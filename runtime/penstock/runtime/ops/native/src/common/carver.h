// Divides a block of memory into arrays. In an unnamed namespace, like lanes.h.
#pragma once

#include <cstdint>

#include "common/common.h"

namespace penstock {
namespace {

// Hands out arrays one after the other; each begins on a cache line of its own. Without memory it only measures: then
// all arrays are null.
class Carver {
 public:
  explicit Carver(char* memory) : memory_(memory) {}

  // An array of `count` values, with room for `spare` bytes behind it.
  template <typename T>
  T* Take(int64_t count, int64_t spare = 0) {
    T* array = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
    used_ += RoundUp(count * static_cast<int64_t>(sizeof(T)) + spare, kCacheLine);
    return array;
  }

  // Bytes of all arrays so far.
  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

}  // namespace
}  // namespace penstock
