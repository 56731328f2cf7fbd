// The lanes of lanes.h in two registers of AVX2. (From an array GCC makes code that keeps lanes in memory, and takes up
// to ten times as long.)
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <initializer_list>

namespace penstock {
namespace {

struct Lanes {
  __m256 low, high;
};

inline Lanes Load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void Store(float* to, Lanes a) {
  _mm256_storeu_ps(to, a.low);
  _mm256_storeu_ps(to + 8, a.high);
}
inline Lanes Fill(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Lanes Add(Lanes a, Lanes b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Lanes Sub(Lanes a, Lanes b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Lanes Mul(Lanes a, Lanes b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Lanes MulAdd(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Lanes Div(Lanes a, Lanes b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }

template <int kApart>
inline Lanes Swapped(Lanes a) {
  if constexpr (kApart == 8) {
    return {a.high, a.low};
  }
  if constexpr (kApart == 4) {
    return {_mm256_permute2f128_ps(a.low, a.low, 1), _mm256_permute2f128_ps(a.high, a.high, 1)};
  }
  constexpr int kOrder = kApart == 2 ? 0x4e : 0xb1;
  return {_mm256_permute_ps(a.low, kOrder), _mm256_permute_ps(a.high, kOrder)};
}

inline float Total(Lanes a) {
  const __m256 eight = _mm256_add_ps(a.low, a.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// If the first operand of min or max is NaN, or the second, the result is the second.
inline Lanes Clip(Lanes a, float low, float high) {
  const __m256 least = _mm256_set1_ps(low), most = _mm256_set1_ps(high);
  return {_mm256_max_ps(least, _mm256_min_ps(most, a.low)), _mm256_max_ps(least, _mm256_min_ps(most, a.high))};
}

// The bits of numbers without their signs.
inline __m256i SizeBits(__m256 a) { return _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7fffffff)); }

inline Lanes LargerSize(Lanes size, Lanes b) {
  return {_mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(size.low), SizeBits(b.low))),
          _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(size.high), SizeBits(b.high)))};
}

inline float LargestSize(Lanes sizes) {
  const __m256i eight = _mm256_max_epi32(_mm256_castps_si256(sizes.low), _mm256_castps_si256(sizes.high));
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(two, _mm_shuffle_epi32(two, 1))));
}

// Packing takes 128 bits of each operand in turn; the permutation puts the words in order.
inline __m256i PackWords(__m256i low, __m256i high) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
}

inline void StoreInt8(int8_t* to, Lanes a) {
  const __m256i byte = _mm256_set1_epi32(0xff);  // packing saturates, so it is given what it keeps
  const __m256i low = _mm256_and_si256(_mm256_cvtps_epi32(a.low), byte);
  const __m256i high = _mm256_and_si256(_mm256_cvtps_epi32(a.high), byte);
  const __m256i words = PackWords(low, high);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

inline void StoreInt16(int16_t* to, Lanes a) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(words, 0xd8));
}

inline __m256 WidenBf16(__m128i narrow) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}

inline Lanes LoadBf16(const uint16_t* from) {
  const auto* halves = reinterpret_cast<const __m128i*>(from);
  return {WidenBf16(_mm_loadu_si128(halves)), WidenBf16(_mm_loadu_si128(halves + 1))};
}

inline void LoadPairs(const uint16_t* from, Lanes* first, Lanes* second) {
  const auto* halves = reinterpret_cast<const __m256i*>(from);
  const __m256i low = _mm256_loadu_si256(halves), high = _mm256_loadu_si256(halves + 1);
  const __m256i upper = _mm256_set1_epi32(-65536);
  *first = {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
  *second = {_mm256_castsi256_ps(_mm256_and_si256(low, upper)), _mm256_castsi256_ps(_mm256_and_si256(high, upper))};
}

// A code of E4M3, moved by 7 bits, is a float16 with the same sign and mantissa, whose exponent counts from 15 and not
// from 7. Conversion from float16 also takes numbers that are smaller than the normal ones.
inline Lanes LoadE4m3(const uint8_t* from) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256i without_14 = _mm256_set1_epi16(static_cast<int16_t>(0xbfff));
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), without_14);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}

// Rounds to nearest, ties to even; the bf16 is in the lower half of each word. NaN stays NaN.
inline __m256i RoundBf16(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}

inline void StoreBf16(uint16_t* to, Lanes a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), PackWords(RoundBf16(a.low), RoundBf16(a.high)));
}

inline __m256 RoundToBf16(__m256 a) { return _mm256_castsi256_ps(_mm256_slli_epi32(RoundBf16(a), 16)); }
inline Lanes RoundToBf16(Lanes a) { return {RoundToBf16(a.low), RoundToBf16(a.high)}; }

inline __m256 Exp(__m256 x) {
  const __m256 clipped = _mm256_max_ps(_mm256_min_ps(x, _mm256_set1_ps(88.0f)), _mm256_set1_ps(-87.0f));
  // 1.5 * 2^23: the sum is rounded to an integer, which is in its lowest bits.
  const __m256 shift = _mm256_set1_ps(12582912.0f);
  const __m256 shifted = _mm256_fmadd_ps(clipped, _mm256_set1_ps(1.44269504088896341f), shift);
  const __m256 n = _mm256_sub_ps(shifted, shift);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), clipped);
  r = _mm256_fmadd_ps(n, _mm256_set1_ps(2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
  }
  p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0f));
  const __m256i exponent = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
  return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

inline Lanes Exp(Lanes x) { return {Exp(x.low), Exp(x.high)}; }

}  // namespace
}  // namespace penstock
