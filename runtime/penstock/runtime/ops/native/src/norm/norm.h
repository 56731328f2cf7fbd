// The operation between a layer's output and the residual stream: RMS or layer norm, scale, and the sum with the
// residual. It also computes the activations of MLPs without a gate.
#pragma once

#include <cstdint>

#include "common/activations.h"

namespace penstock {

// y = (residual + scale * plain(normalised x)) * factor, rounded once. Each row is cut into runs of `size` channels,
// and each run is normalised by its own root mean square, or by its own mean and deviation, and multiplied by offset +
// norm, before bias is added.
struct NormJob {
  const uint16_t* x;         // bf16 [rows, channels]
  const uint16_t* norm;      // bf16 [size], or null: not multiplied
  const uint16_t* bias;      // bf16 [size], or null: not added
  const uint16_t* residual;  // bf16 [rows, channels], or null
  uint16_t* y;               // bf16 [rows, channels]
  int64_t channels, size;    // size divides channels, and is a multiple of 16
  bool normed;               // false: x is taken as it is
  bool centred;              // a layer norm: the mean is subtracted first
  Plain plain;
  float eps, offset, scale, factor;
};

using NormRows = void (*)(const NormJob&, int64_t first, int64_t last);

void NormRowsAvx2(const NormJob&, int64_t first, int64_t last);
void NormRowsAvx512(const NormJob&, int64_t first, int64_t last);
void NormRowsAvx512Bf16(const NormJob&, int64_t first, int64_t last);

}  // namespace penstock
