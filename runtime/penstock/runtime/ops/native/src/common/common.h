// Small helpers that all kernels use. In an unnamed namespace, like lanes.h.
#pragma once

#include <cstdint>

namespace penstock {
namespace {

constexpr float kLog2E = 1.44269504088896341f;  // e^x is 2^(x * kLog2E)
constexpr int64_t kCacheLine = 64;              // bytes

template <typename T>
constexpr T Min(T a, T b) {
  return a < b ? a : b;
}

template <typename T>
constexpr T Max(T a, T b) {
  return a > b ? a : b;
}

// a / b, rounded up; neither is negative.
constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The smallest multiple of `unit` that is at least `value`.
constexpr int64_t RoundUp(int64_t value, int64_t unit) { return CeilDiv(value, unit) * unit; }

}  // namespace
}  // namespace penstock
