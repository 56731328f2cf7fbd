// The operation between a layer's output and the residual stream: RMS norm, scale, and the sum with the residual.
#pragma once

#include <cstdint>

namespace penstock {

// y = (residual + scale * normalised x) * factor, rounded once. Each row is cut into runs of `size` channels, and each
// run is normalised by its own root mean square and multiplied by offset + norm.
struct NormJob {
  const uint16_t* x;         // bf16 [rows, channels]
  const uint16_t* norm;      // bf16 [size], or null: not multiplied
  const uint16_t* residual;  // bf16 [rows, channels], or null
  uint16_t* y;               // bf16 [rows, channels]
  int64_t channels, size;    // size divides channels, and is a multiple of 16
  bool normed;               // false: x is taken as it is
  float eps, offset, scale, factor;
};

using NormRows = void (*)(const NormJob&, int64_t first, int64_t last);

void NormRowsAvx2(const NormJob&, int64_t first, int64_t last);
void NormRowsAvx512(const NormJob&, int64_t first, int64_t last);
void NormRowsAvx512Bf16(const NormJob&, int64_t first, int64_t last);

}  // namespace penstock
