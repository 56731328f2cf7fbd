// The root mean square of channels (Zhang and Sennrich 2019). In an unnamed namespace, like lanes.h.
#pragma once

#include <cmath>

#include "common/lanes.h"

namespace penstock {
namespace {

// 1 / the root of the mean of `size` squares and of eps, where `squares` holds their sums by lane.
inline float InverseRms(Lanes squares, int64_t size, float eps) {
  return 1.0f / std::sqrt(Total(squares) / static_cast<float>(size) + eps);
}

// The same of `size` channels in bf16, a multiple of 16. The squares are summed in the same order wherever the channels
// stand, so the bits depend on these channels alone.
inline float InverseRms(const uint16_t* x, int64_t size, float eps) {
  Lanes squares = Fill(0.0f);
  for (int64_t i = 0; i < size; i += 16) {
    const Lanes value = LoadBf16(x + i);
    squares = Add(squares, Mul(value, value));
  }
  return InverseRms(squares, size, eps);
}

}  // namespace
}  // namespace penstock
