// The lanes of lanes.h in one register of AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace penstock {
namespace {

struct Lanes {
  __m512 v;
};

// Sums of int32 to which instructions add products. GCC copies sums of type __m512i from register to register for each.
using Int32Sums = int32_t __attribute__((vector_size(64)));

inline Lanes Load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline void Store(float* to, Lanes a) { _mm512_storeu_ps(to, a.v); }
inline Lanes Fill(float value) { return {_mm512_set1_ps(value)}; }
inline Lanes Add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes Sub(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
template <int kApart>
inline Lanes Swapped(Lanes a) {
  if constexpr (kApart >= 4) {
    const __m512i words = _mm512_castps_si512(a.v);
    return {_mm512_castsi512_ps(_mm512_shuffle_i32x4(words, words, kApart == 4 ? 0xb1 : 0x4e))};
  }
  const __m512i two = _mm512_setr_epi32(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  const __m512i one = _mm512_setr_epi32(1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  return {_mm512_permutex2var_ps(a.v, kApart == 2 ? two : one, a.v)};
}

inline float Total(Lanes a) { return _mm512_reduce_add_ps(a.v); }
inline Lanes Mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes MulAdd(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes Div(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }

// If the first operand of min or max is NaN, or the second, the result is the second.
inline Lanes Clip(Lanes a, float low, float high) {
  return {_mm512_max_ps(_mm512_set1_ps(low), _mm512_min_ps(_mm512_set1_ps(high), a.v))};
}

inline Lanes LargerSize(Lanes size, Lanes b) {
  const __m512i bits = _mm512_castps_si512(_mm512_abs_ps(b.v));
  return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(size.v), bits))};
}

inline float LargestSize(Lanes sizes) {
  const int32_t bits = _mm512_reduce_max_epi32(_mm512_castps_si512(sizes.v));
  float largest;
  memcpy(&largest, &bits, 4);
  return largest;
}

inline void StoreInt8(int8_t* to, Lanes a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}

inline void StoreInt16(int16_t* to, Lanes a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.v)));
}

inline Lanes LoadBf16(const uint16_t* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

inline void LoadPairs(const uint16_t* from, Lanes* first, Lanes* second) {
  const __m512i pairs = _mm512_loadu_si512(from);
  *first = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
  *second = {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536)))};
}

// See lanes_avx2.h.
inline Lanes LoadE4m3(const uint8_t* from) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return {
      _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbfff))))};
}

inline void StoreBf16(uint16_t* to, Lanes a) {
#if defined(__AVX512BF16__)
  const __m256bh narrow = _mm512_cvtneps_pbh(a.v);
  memcpy(to, &narrow, 32);
#else
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i value = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(value, 16)));
#endif
}

inline Lanes RoundToBf16(Lanes a) {
  uint16_t narrow[16];
  StoreBf16(narrow, a);
  return LoadBf16(narrow);
}

inline Lanes Exp(Lanes x) {
  const __m512 clipped = _mm512_max_ps(_mm512_min_ps(x.v, _mm512_set1_ps(88.0f)), _mm512_set1_ps(-87.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clipped, _mm512_set1_ps(1.44269504088896341f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), clipped);
  r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  }
  p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
  return {_mm512_scalef_ps(p, n)};
}

}  // namespace
}  // namespace penstock
