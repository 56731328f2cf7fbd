// Parts of the linear kernels that are compiled once per instruction set. Everything here is in an unnamed
// namespace: were it shared, the linker would keep one copy, perhaps with instructions the machine lacks.
#pragma once

#include <cstring>

#include "linear.h"

namespace penstock {
namespace {

inline float Widen(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

// To nearest, ties to even; NaN stays NaN.
inline uint16_t Narrow(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return value == value ? static_cast<uint16_t>(rounded) : static_cast<uint16_t>((bits >> 16) | 0x40);
}

// e^x to about 2 ulp (Cephes' polynomial); written so that compilers vectorise loops over it.
inline float Exp(float x) {
  x = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
  const float n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;  // rounded to an integer
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float value = p * r * r + r + 1.0f;
  const int32_t exponent = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  memcpy(&scale, &exponent, 4);
  return value * scale;
}

// Where a unit's blocks are.
struct Span {
  int64_t weight, block, count;
};

inline int64_t UnitsOf(const PackedWeight& weight, int64_t per_unit) {
  return (weight.num_blocks + per_unit - 1) / per_unit;
}

inline int64_t CountUnits(const LinearJob& job, int64_t per_unit) {
  if (job.gate) return UnitsOf(job.weights[0], per_unit);
  int64_t units = 0;
  for (int64_t w = 0; w < job.num_weights; ++w) units += UnitsOf(job.weights[w], per_unit);
  return units;
}

inline Span FindUnit(const LinearJob& job, int64_t unit, int64_t per_unit) {
  int64_t w = 0;
  for (; !job.gate && unit >= UnitsOf(job.weights[w], per_unit); ++w) unit -= UnitsOf(job.weights[w], per_unit);
  const int64_t block = unit * per_unit, left = job.weights[w].num_blocks - block;
  return {w, block, left < per_unit ? left : per_unit};
}

inline int64_t ColumnOf(const LinearJob& job, int64_t weight, int64_t block) {
  int64_t before = block;
  for (int64_t w = 0; w < weight; ++w) before += job.weights[w].num_blocks;
  return before * kBlockOut;
}

// sums [rows, stride]: 16 products of each row, to y's rows from `row` and columns of (weight, block).
inline void Finish(const LinearJob& job, int64_t weight, int64_t block, int64_t row, int64_t rows,
                   const float* sums, int64_t stride) {
  const int64_t column = ColumnOf(job, weight, block);
  float bias[kBlockOut] = {};
  if (const uint16_t* source = job.weights[weight].bias) {
    for (int64_t i = 0; i < kBlockOut; ++i) bias[i] = Widen(source[block * kBlockOut + i]);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = (row + r) * job.ldy + column;
    float value[kBlockOut];
    for (int64_t i = 0; i < kBlockOut; ++i) value[i] = sums[r * stride + i] + bias[i];
    if (job.residual) {
      for (int64_t i = 0; i < kBlockOut; ++i) value[i] += Widen(job.residual[at + i]);
    }
    if (job.y_f32) {
      memcpy(job.y_f32 + at, value, sizeof value);
    } else {
      for (int64_t i = 0; i < kBlockOut; ++i) job.y_bf16[at + i] = Narrow(value[i]);
    }
  }
}

// The same for y = silu(gate) * up, with the biases of both.
inline void FinishGate(const LinearJob& job, int64_t block, int64_t row, int64_t rows, const float* gates,
                       const float* ups, int64_t stride) {
  float bias[2][kBlockOut] = {};
  for (int w = 0; w < 2; ++w) {
    if (const uint16_t* source = job.weights[w].bias) {
      for (int64_t i = 0; i < kBlockOut; ++i) bias[w][i] = Widen(source[block * kBlockOut + i]);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    float value[kBlockOut];
    for (int64_t i = 0; i < kBlockOut; ++i) {
      const float gate = gates[r * stride + i] + bias[0][i], up = ups[r * stride + i] + bias[1][i];
      value[i] = gate / (1.0f + Exp(-gate)) * up;
    }
    uint16_t* out = job.y_bf16 + (row + r) * job.ldy + block * kBlockOut;
    for (int64_t i = 0; i < kBlockOut; ++i) out[i] = Narrow(value[i]);
  }
}

// int32 sums of an int8 product to float32, in place of the same bytes.
inline void Dequantize(const LinearJob& job, int64_t weight, int64_t block, int64_t row, int64_t rows, float* sums,
                       int64_t stride, bool offset) {
  const PackedWeight& w = job.weights[weight];
  const float* scale = w.scale + block * kBlockOut;
  const float* correction = scale + w.num_blocks * kBlockOut;
  for (int64_t r = 0; r < rows; ++r) {
    int32_t whole[kBlockOut];
    memcpy(whole, sums + r * stride, sizeof whole);
    const float x_scale = job.x_scale[row + r];
    for (int64_t i = 0; i < kBlockOut; ++i) {
      const float value = static_cast<float>(whole[i]) - (offset ? correction[i] : 0.0f);
      sums[r * stride + i] = value * (x_scale * scale[i]);
    }
  }
}

// Symmetric int8 of one row of float32; returns its scale.
inline float Quantize(const float* row, int64_t k, int8_t* out) {
  float peak = 0.0f;
  for (int64_t i = 0; i < k; ++i) {
    const float size = row[i] < 0 ? -row[i] : row[i];
    peak = size > peak ? size : peak;
  }
  const float scale = peak / 127.0f, inverse = peak > 0 ? 127.0f / peak : 0.0f;
  for (int64_t i = 0; i < k; ++i) {
    const float scaled = row[i] * inverse;
    out[i] = static_cast<int8_t>(static_cast<int32_t>(scaled + (scaled < 0 ? -0.5f : 0.5f)));
  }
  return scale;
}

}  // namespace
}  // namespace penstock
