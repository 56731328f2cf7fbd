// Reads the operands of FFI operations.
#pragma once

#include <cstdint>

namespace penstock {

// The buffer's values from place `at` on; null if it is empty, which is how an operation is told that it has no such
// operand.
template <typename T, typename Buffer>
const T* From(const Buffer& buffer, int64_t at) {
  return buffer.element_count() ? reinterpret_cast<const T*>(buffer.untyped_data()) + at : nullptr;
}

}  // namespace penstock
