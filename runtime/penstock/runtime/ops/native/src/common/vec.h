// Vectors of float32, of the width that the including file is compiled for, with the functions that attention and the
// sampler need. In an unnamed namespace, like lanes.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace penstock {
namespace {

#ifdef __AVX512F__
struct Vec {
  static constexpr int kWidth = 16;
  using F = __m512;
  static F Load(const float* p) { return _mm512_loadu_ps(p); }
  static void Store(float* p, F x) { _mm512_storeu_ps(p, x); }
  // Past the caches, to an address that is a multiple of the vector's size; see _mm_sfence.
  static void Stream(float* p, F x) { _mm512_stream_ps(p, x); }
  static F Set(float x) { return _mm512_set1_ps(x); }
  // The number of each lane.
  static F Lane() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
  static F Add(F a, F b) { return _mm512_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm512_div_ps(a, b); }
  static F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F Max(F a, F b) { return _mm512_max_ps(a, b); }  // returns b if either is NaN
  static F Min(F a, F b) { return _mm512_min_ps(a, b); }
  static F Abs(F x) { return _mm512_abs_ps(x); }
  static F Less(F a, F b, F yes, F no) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes); }
  // x where low[i] <= key <= high[i], and -infinity elsewhere.
  static F Within(F x, int key, const int32_t* low, const int32_t* high) {
    const __m512i k = _mm512_set1_epi32(key);
    const __mmask16 in =
        _mm512_cmple_epi32_mask(_mm512_loadu_si512(low), k) & _mm512_cmple_epi32_mask(k, _mm512_loadu_si512(high));
    return _mm512_mask_blend_ps(in, _mm512_set1_ps(-__builtin_inff()), x);
  }
  // x in the lanes i with low <= first + i <= high, and -infinity elsewhere.
  static F Between(F x, int first, int low, int high) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i at = _mm512_add_epi32(lane, _mm512_set1_epi32(first));
    const __mmask16 in =
        _mm512_cmple_epi32_mask(_mm512_set1_epi32(low), at) & _mm512_cmple_epi32_mask(at, _mm512_set1_epi32(high));
    return _mm512_mask_blend_ps(in, _mm512_set1_ps(-__builtin_inff()), x);
  }
  static float Highest(F x) { return _mm512_reduce_max_ps(x); }
  static F Widen(const uint16_t* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
  }
  static F Widen(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  // Of pairs of bf16: the values in the low half of each word, and those in the high half.
  static F EvenHalves(F x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 16)); }
  static F OddHalves(F x) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
  // Rounds to nearest, ties to even, and stores bf16.
  static void StoreNarrow(uint16_t* p, F x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
  }
  // Splits x into n + r, where n is an integer and |r| <= 1/2, and returns r; Scale(y, x) is y * 2^n. For -infinity r
  // is 0.
  static F Fraction(F x) { return _mm512_reduce_ps(x, 0); }
  static F Scale(F y, F x) { return _mm512_scalef_ps(y, _mm512_roundscale_ps(x, 0)); }
};
#else
struct Vec {
  static constexpr int kWidth = 8;
  using F = __m256;
  static F Load(const float* p) { return _mm256_loadu_ps(p); }
  static void Store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static void Stream(float* p, F x) { _mm256_stream_ps(p, x); }
  static F Set(float x) { return _mm256_set1_ps(x); }
  static F Lane() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
  static F Add(F a, F b) { return _mm256_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm256_div_ps(a, b); }
  static F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F Max(F a, F b) { return _mm256_max_ps(a, b); }
  static F Min(F a, F b) { return _mm256_min_ps(a, b); }
  static F Abs(F x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
  static F Less(F a, F b, F yes, F no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
  static F Within(F x, int key, const int32_t* low, const int32_t* high) {
    const __m256i k = _mm256_set1_epi32(key);
    const __m256i out =
        _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low)), k),
                        _mm256_cmpgt_epi32(k, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high))));
    return _mm256_blendv_ps(x, _mm256_set1_ps(-__builtin_inff()), _mm256_castsi256_ps(out));
  }
  static F Between(F x, int first, int low, int high) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i at = _mm256_add_epi32(lane, _mm256_set1_epi32(first));
    const __m256i out = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(low), at),
                                        _mm256_cmpgt_epi32(at, _mm256_set1_epi32(high)));
    return _mm256_blendv_ps(x, _mm256_set1_ps(-__builtin_inff()), _mm256_castsi256_ps(out));
  }
  static float Highest(F x) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }
  static F Widen(const uint16_t* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
  }
  static F Widen(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static F EvenHalves(F x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 16)); }
  static F OddHalves(F x) {
    return _mm256_castsi256_ps(
        _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static void StoreNarrow(uint16_t* p, F x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    r = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(r), _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)),
                                             _mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    r = _mm256_srli_epi32(r, 16);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1)));
  }
  // 2^-127 and less count as 0; the order of the operands keeps NaN.
  static F Clamp(F x) { return _mm256_max_ps(_mm256_set1_ps(-127.0f), _mm256_min_ps(_mm256_set1_ps(127.0f), x)); }
  // Adding this rounds to an integer n, and leaves n + 127, the exponent of 2^n, in the lowest bits.
  static F Shift() { return _mm256_set1_ps(12582912.0f + 127.0f); }
  static F Fraction(F x) {
    x = Clamp(x);
    return _mm256_sub_ps(x, _mm256_sub_ps(_mm256_add_ps(x, Shift()), Shift()));
  }
  static F Scale(F y, F x) {
    const __m256i n = _mm256_castps_si256(_mm256_add_ps(Clamp(x), Shift()));
    return _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(n, 23)));
  }
};
#endif

// 2^x for x <= 127, to 2 ulp: a least-squares polynomial for 2^r on [-1/2, 1/2] (relative error 2e-8).
inline Vec::F Exp2(Vec::F x) {
  const Vec::F r = Vec::Fraction(x);
  Vec::F p = Vec::Set(1.533757683e-4f);
  p = Vec::Fma(p, r, Vec::Set(1.339986036e-3f));
  p = Vec::Fma(p, r, Vec::Set(9.618519534e-3f));
  p = Vec::Fma(p, r, Vec::Set(5.550328998e-2f));
  p = Vec::Fma(p, r, Vec::Set(2.402264661e-1f));
  p = Vec::Fma(p, r, Vec::Set(6.931472056e-1f));
  p = Vec::Fma(p, r, Vec::Set(1.0f));
  return Vec::Scale(p, x);
}

// tanh: Cephes' polynomial below 0.625, 1 - 2 / (e^2|x| + 1) above.
inline Vec::F Tanh(Vec::F x) {
  const Vec::F size = Vec::Abs(x), z = Vec::Mul(x, x);
  Vec::F p = Vec::Set(-5.70498872745e-3f);
  p = Vec::Fma(p, z, Vec::Set(2.06390887954e-2f));
  p = Vec::Fma(p, z, Vec::Set(-5.37397155531e-2f));
  p = Vec::Fma(p, z, Vec::Set(1.33314422036e-1f));
  p = Vec::Fma(p, z, Vec::Set(-3.33332819422e-1f));
  const Vec::F small = Vec::Fma(Vec::Mul(p, z), x, x);
  const Vec::F e = Exp2(Vec::Mul(Vec::Min(Vec::Set(20.0f), size), Vec::Set(2.8853900817779268f)));
  const Vec::F large = Vec::Sub(Vec::Set(1.0f), Vec::Div(Vec::Set(2.0f), Vec::Add(e, Vec::Set(1.0f))));
  const Vec::F sign = Vec::Less(x, Vec::Set(0.0f), Vec::Set(-1.0f), Vec::Set(1.0f));
  return Vec::Less(size, Vec::Set(0.625f), small, Vec::Mul(large, sign));
}

}  // namespace
}  // namespace penstock
