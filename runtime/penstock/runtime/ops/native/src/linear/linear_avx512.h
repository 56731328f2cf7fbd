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
  static constexpr bool kByGroup = false;
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

// Products of weights and the int8 of a row's group. Instructions take those of weights as unsigned, and a row's as
// signed.
struct VnniByGroup {
  using Sum = Int32Sums;
  using Operand = __m512i;
  using Floats = __m512;
  static constexpr bool kByGroup = true;
  static constexpr int kParts = 1, kRows = 16, kPairedRows = 8, kWidth = 16, kGroups = 2;
  static constexpr Form kForm = Form::kFour;
  static constexpr LeastOf kLeast = LeastOf::kNothing;
  static Operand Word(const uint32_t* x) { return _mm512_set1_epi32(static_cast<int>(*x)); }
  static Sum Add(Sum sum, Operand weights, Operand word) {
    return (Sum)_mm512_dpbusd_epi32((__m512i)sum, weights, word);
  }
  static Sum Begin(const uint32_t* word) { return (Sum)Word(word); }
  static Floats Total(Sum sum, const uint32_t*) { return _mm512_cvtepi32_ps((__m512i)sum); }
  static Floats Load(const float* from) { return _mm512_loadu_ps(from); }
  static void Store(float* to, Floats value) { _mm512_storeu_ps(to, value); }
  static Floats Fill(const uint32_t* word) { return _mm512_castsi512_ps(Word(word)); }
  static Floats Halves(const char* halves) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
  }
  static Floats Bytes(const char* bytes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
  }
  static Floats Times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats PlusProduct(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(b, c, a); }
  static Floats MinusProduct(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(b, c, a); }
};

struct VnniInt8 : VnniByGroup {
  static constexpr int kSteps = 1, kScaleLines = 0, kGroupLines = 8, kCodeLines = 8, kMiddle = 128;
  template <int kStep>
  static Operand Weights(const char* group, int line, int) {
    return _mm512_xor_si512(_mm512_loadu_si512(group + line * kLine), _mm512_set1_epi32(static_cast<int>(0x80808080)));
  }
};

template <int kBits, LeastOf kLeastOf>
struct VnniCodes : VnniByGroup {
  static constexpr LeastOf kLeast = kLeastOf;
  static constexpr bool kIsCentred = kLeast == LeastOf::kNothing;
  static constexpr int kSteps = kBits == 4 ? 2 : 1, kScaleLines = kIsCentred ? 1 : 2, kGroupLines = kBits == 4 ? 4 : 8;
  static constexpr int kCodeLines = kGroupLines, kMiddle = kIsCentred ? 1 << (kBits - 1) : 0;
  template <int kStep>
  static Operand Weights(const char* group, int line, int) {
    const __m512i codes = _mm512_loadu_si512(group + line * kLine);
    if (kBits == 8) {
      return codes;
    }
    return _mm512_and_si512(kStep == 0 ? codes : _mm512_srli_epi32(codes, 4), _mm512_set1_epi32(0x0f0f0f0f));
  }
  static Sum Begin(const uint32_t* word) { return kIsCentred ? VnniByGroup::Begin(word) : Sum{}; }
  static Floats Scale(const char* tile, int group, int) { return Halves(tile + group * kLine / 2); }
  static Floats Least(const char* tile, int group, int) { return Halves(tile + kLine + group * kLine / 2); }
};

// Codes of 6 bits are multiplied as unsigned ones, and what that adds to them is taken off with the minimum.
template <int kBits>
struct VnniNested : VnniByGroup {
  static constexpr int kSteps = 2, kGroups = kBits == 4 ? 2 : 4, kScaleLines = kBits / 2, kCodeLines = 8 / kGroups;
  static constexpr int kGroupLines = kBits == 4 ? 4 : 3, kMiddle = 0;
  static constexpr LeastOf kLeast = LeastOf::kMinima;
  template <int kStep>
  static Operand Weights(const char* group, int line, int) {
    const __m512i codes = _mm512_loadu_si512(group + line * kLine);
    const __m512i low =
        _mm512_and_si512(kStep == 0 ? codes : _mm512_srli_epi32(codes, 4), _mm512_set1_epi32(0x0f0f0f0f));
    if (kBits == 4) {
      return low;
    }
    const __m512i bits = _mm512_loadu_si512(group + kCodeLines * kLine);
    const __m512i first = kStep == 0 ? _mm512_slli_epi32(bits, 4) : _mm512_slli_epi32(bits, 2);
    const __m512i high = line == 0 ? first : kStep == 0 ? bits : _mm512_srli_epi32(bits, 2);
    return _mm512_or_si512(low, _mm512_and_si512(high, _mm512_set1_epi32(0x30303030)));
  }
  static Sum Begin(const uint32_t*) { return Sum{}; }
  static Floats Scale(const char* tile, int group, int) {
    return Times(Halves(tile), Bytes(tile + kLine + group * kBlockOut));
  }
  static Floats Least(const char* tile, int group, int part) {
    const Floats minimum = Times(Halves(tile + kLine / 2), Bytes(tile + kLine + (kGroups + group) * kBlockOut));
    return kBits == 4 ? minimum : PlusProduct(minimum, Scale(tile, group, part), _mm512_set1_ps(32.0f));
  }
};

// What stands in the table is multiplied as an unsigned number from 1 to 241, 128 more than it is.
struct VnniTable : VnniByGroup {
  static constexpr int kSteps = 2, kScaleLines = 1, kGroupLines = 4, kCodeLines = 4, kMiddle = 128;
  template <int kStep>
  static Operand Weights(const char* group, int line, int) {
    const __m512i codes = _mm512_loadu_si512(group + line * kLine);
    const __m512i places =
        _mm512_and_si512(kStep == 0 ? codes : _mm512_srli_epi32(codes, 4), _mm512_set1_epi32(0x0f0f0f0f));
    const __m512i table =
        _mm512_xor_si512(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kTable))),
                         _mm512_set1_epi32(static_cast<int>(0x80808080)));
    return _mm512_shuffle_epi8(table, places);
  }
  static Floats Scale(const char* tile, int group, int) {
    return Times(Halves(tile), Bytes(tile + kLine / 2 + group * kBlockOut));
  }
};

}  // namespace
}  // namespace penstock
