// Symmetric int8: the largest size of a row becomes 127, and the row keeps a scale, that size / 127. In an unnamed
// namespace, like lanes.h.
#pragma once

#include "common/lanes.h"

namespace penstock {
namespace {

inline Lanes Widened(const float* from) { return Load(from); }
inline Lanes Widened(const uint16_t* from) { return LoadBf16(from); }

// The largest size in a row of float32 or bf16. k is a multiple of 16. If any value is NaN, so is the result; if it is
// not finite, neither are the row's scale and whatever is computed with it.
template <typename T>
inline float RowPeak(const T* row, int64_t k) {
  Lanes peak = Fill(0.0f);
  for (int64_t i = 0; i < k; i += 16) {
    peak = LargerSize(peak, Widened(row + i));
  }
  return LargestSize(peak);
}

// A row with a smaller peak counts as zeros: 127 / peak must be finite.
constexpr float kLeastPeak = 1e-30f;

// What a row's values are multiplied by so that `most` is the largest. It is 0 if the peak is too small, or not finite.
inline float Inverse(float peak, float most) { return peak >= kLeastPeak && peak <= __FLT_MAX__ ? most / peak : 0.0f; }
inline float Int8Inverse(float peak) { return Inverse(peak, 127.0f); }

// Quantizes values to int8, by the Int8Inverse of their row; count is a multiple of 16.
template <typename T>
inline void Quantize(const T* from, int64_t count, float inverse, int8_t* out) {
  for (int64_t i = 0; i < count; i += 16) {
    StoreInt8(out + i, Mul(Widened(from + i), Fill(inverse)));
  }
}

}  // namespace
}  // namespace penstock
