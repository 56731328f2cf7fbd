// The functions on vectors that only the sampler needs: comparisons, masks, ends of arrays. In an unnamed namespace,
// like common/lanes.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "common/vec.h"

namespace penstock {
namespace {

using F = Vec::F;
constexpr int kWidth = Vec::kWidth;
constexpr float kInfinity = __builtin_inff();

#ifdef __AVX512F__
using I = __m512i;
using M = __mmask16;  // one bit for each lane

inline M First(int count) { return static_cast<M>((1u << count) - 1); }
inline F LoadFirst(const float* p, int count) {
  return _mm512_mask_loadu_ps(_mm512_set1_ps(-kInfinity), First(count), p);
}
inline I LoadInts(const int32_t* p) { return _mm512_loadu_si512(p); }
inline I LoadFirstInts(const int32_t* p, int count) { return _mm512_maskz_loadu_epi32(First(count), p); }
inline M NonZero(I x) { return _mm512_test_epi32_mask(x, x); }
inline F LowBits(I x, int bits) { return _mm512_cvtepi32_ps(_mm512_and_si512(x, _mm512_set1_epi32((1 << bits) - 1))); }
inline M LessEqual(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
inline M Equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline M IsNan(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
inline F Choose(M m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }
inline M Or(M a, M b) { return a | b; }
inline M AndNot(M a, M b) { return a & ~b; }
inline M NoLane() { return 0; }
inline uint32_t Bits(M m) { return m; }
// The lanes whose bits are set in a packed array, from bit `at` on, which is a multiple of the width.
inline M PackedLanes(const int32_t* packed, int64_t at) { return reinterpret_cast<const uint16_t*>(packed)[at / 16]; }
// Stores the lanes of `m` one after the other. Writes a whole vector.
inline void Compress(float* to, M m, F x) { _mm512_storeu_ps(to, _mm512_maskz_compress_ps(m, x)); }
inline float Largest(F x) { return _mm512_reduce_max_ps(x); }
inline float Sum(F x) { return _mm512_reduce_add_ps(x); }
#else
using I = __m256i;
using M = __m256;  // each lane has all bits set, or none

inline I LaneNumbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline I First(int count) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), LaneNumbers()); }
inline F LoadFirst(const float* p, int count) {
  const I first = First(count);
  return _mm256_blendv_ps(_mm256_set1_ps(-kInfinity), _mm256_maskload_ps(p, first), _mm256_castsi256_ps(first));
}
inline I LoadInts(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline I LoadFirstInts(const int32_t* p, int count) { return _mm256_maskload_epi32(p, First(count)); }
inline M NonZero(I x) {
  const I zero = _mm256_cmpeq_epi32(x, _mm256_setzero_si256());
  return _mm256_castsi256_ps(_mm256_xor_si256(zero, _mm256_set1_epi32(-1)));
}
inline F LowBits(I x, int bits) { return _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32((1 << bits) - 1))); }
inline M LessEqual(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_LE_OQ); }
inline M Equal(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
inline M IsNan(F a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
inline F Choose(M m, F yes, F no) { return _mm256_blendv_ps(no, yes, m); }
inline M Or(M a, M b) { return _mm256_or_ps(a, b); }
inline M AndNot(M a, M b) { return _mm256_andnot_ps(b, a); }
inline M NoLane() { return _mm256_setzero_ps(); }
inline uint32_t Bits(M m) { return static_cast<uint32_t>(_mm256_movemask_ps(m)); }
inline M PackedLanes(const int32_t* packed, int64_t at) {
  const I bit = _mm256_sllv_epi32(_mm256_set1_epi32(1), LaneNumbers());
  const I bits = _mm256_set1_epi32(reinterpret_cast<const uint8_t*>(packed)[at / 8]);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(bits, bit), bit));
}

// For each mask of eight lanes, the numbers of the lanes that are set, in order.
struct alignas(32) SetLanes {
  int32_t lanes[256][kWidth] = {};
  constexpr SetLanes() {
    for (int mask = 0; mask < 256; ++mask) {
      for (int lane = 0, to = 0; lane < kWidth; ++lane) {
        if (mask >> lane & 1) {
          lanes[mask][to++] = lane;
        }
      }
    }
  }
};
constexpr SetLanes kSetLanes;

inline void Compress(float* to, M m, F x) {
  _mm256_storeu_ps(to, _mm256_permutevar8x32_ps(x, LoadInts(kSetLanes.lanes[Bits(m)])));
}
inline float Largest(F x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
inline float Sum(F x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
#endif

// A vector of which only the first `left` elements are loaded; the others are -infinity, or 0.
inline F LoadUpTo(const float* p, int64_t left) {
  return __builtin_expect(left >= kWidth, 1) ? Vec::Load(p) : LoadFirst(p, static_cast<int>(left));
}
inline I LoadIntsUpTo(const int32_t* p, int64_t left) {
  return __builtin_expect(left >= kWidth, 1) ? LoadInts(p) : LoadFirstInts(p, static_cast<int>(left));
}

// 2^x for x <= 0. It is 0 for results below float32's normal numbers, on which processors may take a hundred times
// longer.
inline F Power(F x) { return Exp2(Vec::Less(x, Vec::Set(-126.0f), Vec::Set(-kInfinity), x)); }

}  // namespace
}  // namespace penstock
