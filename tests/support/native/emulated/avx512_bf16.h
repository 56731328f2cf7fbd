// AVX512_BF16's intrinsics in plain C++; see avx512.h.
#pragma once

#include "avx512.h"

#define __AVX512BF16__ 1

namespace penstock {
namespace {

// To nearest, ties to even. Denormals become zeros of their sign, NaN stays NaN and is quiet; MXCSR counts for nothing.
inline uint16_t NarrowLane(float a) {
  const uint32_t bits = BitsAs<uint32_t>(a), size = bits & 0x7fffffff;
  if (size < 0x800000) return static_cast<uint16_t>(bits >> 16 & 0x8000);
  if (size > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline __m256bh _mm512_cvtneps_pbh(__m512 a) {
  return (__m256bh)ByLane<U16x16>([&](int i) { return NarrowLane(a[i]); });
}
// The lower half of the result is of b.
inline __m512bh _mm512_cvtne2ps_pbh(__m512 a, __m512 b) {
  return (__m512bh)ByLane<U16x32>([&](int i) { return NarrowLane(i < 16 ? b[i] : a[i - 16]); });
}
// The sums of _mm512_dpbf16_ps. They are no part of it, because compilers might move them out of its mode of rounding.
__attribute__((noinline)) void DotLanes(float* sum, const uint32_t* a, const uint32_t* b) {
  for (const bool odd : {true, false}) {
    for (int i = 0; i < kFloatLanes; ++i) {
      const uint32_t x = odd ? a[i] & 0xffff0000 : a[i] << 16, y = odd ? b[i] & 0xffff0000 : b[i] << 16;
      sum[i] = __builtin_fmaf(BitsAs<float>(x), BitsAs<float>(y), sum[i]);
    }
  }
}
// Adds to each lane the product of the odd elements of its pairs, then that of the even ones, each by a fused
// multiply-add that rounds to nearest even. Denormals count as zero, and become zero, whatever MXCSR says.
inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  float sums[kFloatLanes];
  uint32_t x[kFloatLanes], y[kFloatLanes];
  memcpy(sums, &sum, sizeof sums);
  memcpy(x, &a, sizeof x);
  memcpy(y, &b, sizeof y);
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(0x9fc0);
  DotLanes(sums, x, y);
  _mm_setcsr(mode);
  return _mm512_loadu_ps(sums);
}

}  // namespace
}  // namespace penstock
