// How AVX-512 multiplies: the traits class for linear_vector.h.
#pragma once

#include <immintrin.h>

#include "common/lanes.h"
#include "linear/linear_panels.h"

namespace penstock {
namespace {

struct WideBf16 {
  using Sum = __m512;
  using Operand = __m512;
  static constexpr int kParts = 1, kSteps = 2, kRows = 16, kPairedRows = 8, kWidth = 16;
  static constexpr Form kForm = Form::kFloat;
  static Sum LoadSum(const float* from) { return _mm512_loadu_ps(from); }
  static void StoreSum(float* to, Sum sum) { _mm512_storeu_ps(to, sum); }
  template <int kStep>
  static Operand Weights(const char* tile_row, int) {
    const __m512i pairs = _mm512_loadu_si512(tile_row);
    if (kStep == 0) {
      return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    }
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static Operand Word(const uint32_t* x) { return _mm512_set1_ps(*reinterpret_cast<const float*>(x)); }
  static Sum Add(Sum sum, Operand weights, Operand word) { return _mm512_fmadd_ps(weights, word, sum); }
};

struct VnniInt8 {
  using Sum = Int32Sums;
  using Operand = __m512i;
  static constexpr int kParts = 1, kSteps = 1, kRows = 16, kPairedRows = 8, kWidth = 16;
  static constexpr Form kForm = Form::kFourOffset;
  static Sum LoadSum(const float* from) { return (Sum)_mm512_loadu_si512(from); }
  static void StoreSum(float* to, Sum sum) { _mm512_storeu_si512(to, (__m512i)sum); }
  template <int kStep>
  static Operand Weights(const char* tile_row, int) {
    return _mm512_loadu_si512(tile_row);
  }
  static Operand Word(const uint32_t* x) { return _mm512_set1_epi32(static_cast<int>(*x)); }
  static Sum Add(Sum sum, Operand weights, Operand word) {
    return (Sum)_mm512_dpbusd_epi32((__m512i)sum, word, weights);
  }
};

}  // namespace
}  // namespace penstock
