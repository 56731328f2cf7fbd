// What AVX-512 multiplies in attention (attention_lanes.h): pairs of bf16 where it has instructions for them, else bf16
// as float32; and int8 as int16. Sums have the dims of every 32 in two vectors, which Finish puts in order.
#pragma once

#include "attention/attention_numbers.h"
#include "common/common.h"
#include "common/vec.h"

namespace penstock {
namespace {

// Which lanes of a and b belong to the first 16 of 32 dims; the others are 8 further. Either lanes of both take turns,
// or blocks of four lanes do, as unpacklo and unpackhi leave them.
inline __m512i LanesInTurns() { return _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
inline __m512i BlocksInTurns() { return _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23); }

inline void StoreInTurns(float* to, __m512 a, __m512 b, __m512i which) {
  _mm512_storeu_ps(to, _mm512_permutex2var_ps(a, which, b));
  _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(a, _mm512_add_epi32(which, _mm512_set1_epi32(8)), b));
}

// The numbers of two keys side by side: in each 16 bytes, of four dims in the first vector and of four more in the
// second.
inline void Interleave(__m512i even, __m512i odd, __m512i* two) {
  two[0] = _mm512_unpacklo_epi16(even, odd);
  two[1] = _mm512_unpackhi_epi16(even, odd);
}

inline __m256i UpperHalf(__m512i a) { return _mm512_extracti64x4_epi64(a, 1); }

#ifdef __AVX512BF16__

// Sixteen numbers as bf16, in the low halves of words.
inline __m512i Bf16Words(const uint16_t* from) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Numbers<uint16_t> as pairs of bf16.
struct Bf16Products {
  using Query = uint16_t;
  using Sum = __m512;
  using Values = __m512i;
  using Key = __m512i;
  static constexpr int kDims = 32;
  static constexpr int kKeys = 2;
  static float PrepareQuery(const uint16_t* from, int64_t dim, uint16_t* to) {
    memcpy(to, from, dim * 2);
    memset(to + dim, 0, (PaddedDims(dim) - dim) * 2);
    return 1.0f;
  }
  static Key Load(const char* from) { return _mm512_loadu_si512(from); }
  static Key LoadSixteen(const char* from) { return _mm512_maskz_loadu_epi32(0xff, from); }
  static Sum Add(Sum sum, Key key, const uint16_t* query) {
    return _mm512_dpbf16_ps(sum, (__m512bh)key, (__m512bh)_mm512_loadu_si512(query));
  }
  static void LoadValues(const char* from, int64_t stride, Values* two) {
    Interleave(Load(from), Load(from + stride), two);
  }
  static Values LoadSixteenValues(const char* from, int64_t stride) {
    const __m512i odd = Bf16Words(reinterpret_cast<const uint16_t*>(from + stride));
    return _mm512_or_si512(Bf16Words(reinterpret_cast<const uint16_t*>(from)), _mm512_slli_epi32(odd, 16));
  }
  static void RoundProbabilities(int count, int first, int last, float* probabilities, float*) {
    for (int c = 0; c < count; ++c) {
      float* row = probabilities + c * kSplit;
      for (int key = first; key < last; key += 16) {
        StoreBf16(reinterpret_cast<uint16_t*>(row) + key, penstock::Load(row + key));
      }
    }
  }
  static Values LoadProbability(const float* row, int key) { return _mm512_set1_epi32(TwoProbabilities(row, key)); }
  static Sum AddValues(Sum sum, Values values, Values probability) {
    return _mm512_dpbf16_ps(sum, (__m512bh)values, (__m512bh)probability);
  }
  static Sum LoadSums(const float* from) { return Vec::Load(from); }
  static void StoreSums(float* to, Sum sums) { Vec::Store(to, sums); }
  static __m512i Order() { return BlocksInTurns(); }
};

#else

// Numbers<uint16_t> without instructions for pairs.
struct Bf16Products : AsFloat32 {
  static Values LoadSixteenValues(const char* from, int64_t /*stride*/) {
    return Vec::Widen(reinterpret_cast<const uint16_t*>(from));
  }
  static __m512i Order() { return LanesInTurns(); }
};

#endif

template <>
struct Numbers<uint16_t> : Bf16Products {
  static Sum Zero() { return _mm512_setzero_ps(); }
  static Sum AddHalves(Sum a, Sum b) {
    const __m512i x = _mm512_castps_si512(a), y = _mm512_castps_si512(b);
    return Vec::Add(_mm512_castsi512_ps(_mm512_unpacklo_epi32(x, y)), _mm512_castsi512_ps(_mm512_unpackhi_epi32(x, y)));
  }
  static Sum AddPairs(Sum a, Sum b) {
    const __m512i x = _mm512_castps_si512(a), y = _mm512_castps_si512(b);
    return Vec::Add(_mm512_castsi512_ps(_mm512_unpacklo_epi64(x, y)), _mm512_castsi512_ps(_mm512_unpackhi_epi64(x, y)));
  }
  static __m128 AddLanes(Sum a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m256 eight =
        _mm256_add_ps(_mm256_castsi256_ps(_mm512_castsi512_si256(bits)), _mm256_castsi256_ps(UpperHalf(bits)));
    return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  }
  static void Finish(float, float* sums) { StoreInTurns(sums, Vec::Load(sums), Vec::Load(sums + 16), Order()); }
  static void FinishSixteen(float, float*) {}
};

template <>
struct Numbers<int8_t> : AsInt16 {
  using Sum = Int32Sums;
  using Values = __m512i;
  using Key = __m512i;
  static constexpr int kDims = 32;
  static constexpr int kKeys = 2;
  static Sum Zero() { return Sum{}; }
  static Key Load(const char* from) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static Key LoadSixteen(const char* from) {
    return _mm512_cvtepi8_epi16(_mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  static Sum Add(Sum sum, Key key, const int16_t* query) {
    return (Sum)_mm512_dpwssd_epi32((__m512i)sum, key, _mm512_loadu_si512(query));
  }
  static Sum AddHalves(Sum a, Sum b) {
    const auto x = (__m512i)a, y = (__m512i)b;
    return (Sum)_mm512_add_epi32(_mm512_unpacklo_epi32(x, y), _mm512_unpackhi_epi32(x, y));
  }
  static Sum AddPairs(Sum a, Sum b) {
    const auto x = (__m512i)a, y = (__m512i)b;
    return (Sum)_mm512_add_epi32(_mm512_unpacklo_epi64(x, y), _mm512_unpackhi_epi64(x, y));
  }
  static __m128 AddLanes(Sum a) {
    const __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256((__m512i)a), UpperHalf((__m512i)a));
    return _mm_cvtepi32_ps(_mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1)));
  }
  static void LoadValues(const char* from, int64_t stride, Values* two) {
    Interleave(Load(from), Load(from + stride), two);
  }
  static Values LoadSixteenValues(const char* from, int64_t stride) {
    const auto widened = [](const char* at) {
      return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    };
    const __m512i even = _mm512_and_si512(widened(from), _mm512_set1_epi32(0xffff));
    return _mm512_or_si512(even, _mm512_slli_epi32(widened(from + stride), 16));
  }
  static Values LoadProbability(const float* row, int key) { return _mm512_set1_epi32(TwoProbabilities(row, key)); }
  static Sum AddValues(Sum sum, Values values, Values probability) {
    return (Sum)_mm512_dpwssd_epi32((__m512i)sum, values, probability);
  }
  static Sum LoadSums(const float* from) { return (Sum)_mm512_loadu_si512(from); }
  static void StoreSums(float* to, Sum sums) { _mm512_storeu_si512(to, (__m512i)sums); }
  static void Finish(float scale, float* sums) {
    StoreInTurns(sums, Number(scale, sums), Number(scale, sums + 16), BlocksInTurns());
  }
  static void FinishSixteen(float scale, float* sums) { Vec::Store(sums, Number(scale, sums)); }

 private:
  static __m512 Number(float scale, const float* sums) {
    return Vec::Mul(_mm512_cvtepi32_ps(_mm512_loadu_si512(sums)), Vec::Set(scale));
  }
};

}  // namespace
}  // namespace penstock
