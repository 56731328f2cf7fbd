// Vectors of bf16 or float32 in memory, and what else the kernels of recurrent layers share. In an unnamed namespace,
// like vec.h.
#pragma once

#include <immintrin.h>

#include "common/common.h"
#include "common/vec.h"

namespace penstock {
namespace {

inline Vec::F LoadValues(const uint16_t* from) { return Vec::Widen(from); }
inline Vec::F LoadValues(const float* from) { return Vec::Load(from); }
inline void StoreValues(uint16_t* to, Vec::F x) { Vec::StoreNarrow(to, x); }
inline void StoreValues(float* to, Vec::F x) { Vec::Store(to, x); }

// The sum of the lanes, in their order.
inline float Total(Vec::F x) {
  alignas(64) float lanes[Vec::kWidth];
  Vec::Store(lanes, x);
  float total = 0.0f;
  for (float lane : lanes) {
    total += lane;
  }
  return total;
}

// x * sigmoid(x)
inline Vec::F Silu(Vec::F x) { return Vec::Div(x, Vec::Add(Vec::Set(1.0f), Exp2(Vec::Mul(x, Vec::Set(-kLog2E))))); }

// While it lives, this thread's numbers too small for float32's full precision count as 0. What decays gets there, many
// processors take a hundred cycles for each of them, and XLA's own threads may differ in how they treat them.
class TinyIsZero {
 public:
  TinyIsZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~TinyIsZero() { _mm_setcsr(before_); }
  TinyIsZero(const TinyIsZero&) = delete;
  TinyIsZero& operator=(const TinyIsZero&) = delete;

 private:
  unsigned before_;
};

}  // namespace
}  // namespace penstock
