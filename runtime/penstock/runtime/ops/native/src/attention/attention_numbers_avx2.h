// What AVX2 multiplies in attention (attention_lanes.h): numbers of bf16 as float32, and of int8 as int16. Sums have
// the dims of every 16 in two vectors, which Finish puts in order.
#pragma once

#include <cstring>

#include "attention/attention_numbers.h"
#include "common/common.h"
#include "common/vec.h"

namespace penstock {
namespace {

// Stores the lower halves of a and b, then the upper ones.
inline void StoreHalves(float* to, Vec::F a, Vec::F b) {
  Vec::Store(to, _mm256_permute2f128_ps(a, b, 0x20));
  Vec::Store(to + 8, _mm256_permute2f128_ps(a, b, 0x31));
}

template <>
struct Numbers<uint16_t> : AsFloat32 {
  static Sum Zero() { return Vec::Set(0.0f); }
  static Sum AddHalves(Sum a, Sum b) { return Vec::Add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)); }
  static Sum AddPairs(Sum a, Sum b) { return Vec::Add(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee)); }
  static __m128 AddLanes(Sum a) { return _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)); }
  static void Finish(float, float* sums) {
    const Vec::F even = Vec::Load(sums), odd = Vec::Load(sums + 8);
    StoreHalves(sums, _mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
  }
};

template <>
struct Numbers<int8_t> : AsInt16 {
  using Sum = __m256i;
  using Values = __m256i;
  static constexpr int kDims = 16;
  static constexpr int kKeys = 2;
  using Key = __m256i;
  static Sum Zero() { return _mm256_setzero_si256(); }
  static Key Load(const char* from) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static Key LoadSixteen(const char* from) { return Load(from); }
  // Instructions written out: given intrinsics, GCC adds up products in another order, for which it has no registers.
  static Sum AddProducts(Sum sum, __m256i a, __m256i b) {
    __m256i product;
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(a), "x"(b));
    return sum;
  }
  static Sum Add(Sum sum, Key key, const int16_t* query) {
    return AddProducts(sum, key, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(query)));
  }
  static Sum AddHalves(Sum a, Sum b) {
    return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  }
  static Sum AddPairs(Sum a, Sum b) {
    return _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
  }
  static __m128 AddLanes(Sum a) {
    return _mm_cvtepi32_ps(_mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
  }

  // Sixteen dims of the values of two keys, which lie `stride` bytes apart: pairs of dims 0 to 3 and 8 to 11, and of
  // the others.
  static void LoadValues(const char* from, int64_t stride, Values* two) {
    const __m256i even = Load(from), odd = Load(from + stride);
    two[0] = _mm256_unpacklo_epi16(even, odd);
    two[1] = _mm256_unpackhi_epi16(even, odd);
  }
  static Values LoadProbability(const float* row, int key) { return _mm256_set1_epi32(TwoProbabilities(row, key)); }
  static Sum AddValues(Sum sum, Values values, Values probability) { return AddProducts(sum, values, probability); }
  static Sum LoadSums(const float* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static void StoreSums(float* to, Sum sums) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), sums); }
  static void Finish(float scale, float* sums) {
    const auto number = [&](int at) { return Vec::Mul(_mm256_cvtepi32_ps(LoadSums(sums + at)), Vec::Set(scale)); };
    StoreHalves(sums, number(0), number(8));
  }
};

}  // namespace
}  // namespace penstock
