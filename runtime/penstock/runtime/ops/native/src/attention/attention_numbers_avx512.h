// What AVX-512 multiplies in attention (attention_lanes.h): pairs of bf16 where it has instructions for them, else bf16
// as float32; and int8 as int16. Sums have the dims of every 32 in two vectors, which Finish puts in order.
#pragma once

#include "attention/attention_rounding.h"
#include "attention/attention_rows.h"
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

// Sixteen words of the numbers of two keys: of each dim `even` in the lower half, `odd` in the upper one.
inline __m512i PairWords(__m512i even, __m512i odd) {
  return _mm512_or_si512(_mm512_and_si512(even, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(odd, 16));
}

inline __m256i UpperHalf(__m512i a) { return _mm512_extracti64x4_epi64(a, 1); }

template <>
struct Numbers<uint16_t> {
  using Sum = __m512;
  static constexpr int kDims = 32;
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
  static Sum LoadSums(const float* from) { return Vec::Load(from); }
  static void StoreSums(float* to, Sum sums) { Vec::Store(to, sums); }
  static void FinishSixteen(float, float*) {}

#ifdef __AVX512BF16__

  using Query = uint16_t;
  using Values = __m512i;
  using Key = __m512i;
  static constexpr int kKeys = 2;
  static float PrepareQuery(const uint16_t* from, int64_t dim, uint16_t* to) {
    memcpy(to, from, dim * 2);
    return 1.0f;
  }
  static Key Load(const char* from) { return _mm512_loadu_si512(from); }
  static Key LoadSixteen(const char* from) { return _mm512_maskz_loadu_epi32(0xff, from); }
  static Sum Add(Sum sum, Key key, const uint16_t* query) {
    return _mm512_dpbf16_ps(sum, (__m512bh)key, (__m512bh)_mm512_loadu_si512(query));
  }
  static void LoadValues(const char* from, int64_t stride, Values* two) {
    const __m512i even = Load(from), odd = Load(from + stride);
    two[0] = _mm512_unpacklo_epi16(even, odd);
    two[1] = _mm512_unpackhi_epi16(even, odd);
  }
  static Values LoadSixteenValues(const char* from, int64_t stride) {
    return PairWords(Bf16Words(reinterpret_cast<const uint16_t*>(from)),
                     Bf16Words(reinterpret_cast<const uint16_t*>(from + stride)));
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
  static void Finish(float, float* sums) { StoreInTurns(sums, Vec::Load(sums), Vec::Load(sums + 16), BlocksInTurns()); }

#else

  using Query = float;
  using Values = __m512;
  struct Key {
    __m512 even, odd;
  };
  static constexpr int kKeys = 1;
  // Of each 32 dims the even ones first; of the last 16 the even ones, zeros, the odd ones and zeros.
  static float PrepareQuery(const uint16_t* from, int64_t dim, float* to) {
    for (int64_t d = 0; d < dim; d += 32) {
      const auto* at = reinterpret_cast<const char*>(from + d);
      const Key numbers = d + 32 <= dim ? Load(at) : LoadSixteen(at);
      Vec::Store(to + d, numbers.even);
      Vec::Store(to + d + 16, numbers.odd);
    }
    return 1.0f;
  }
  static Key Halves(__m512 pairs) { return {Vec::EvenHalves(pairs), Vec::OddHalves(pairs)}; }
  static Key Load(const char* from) { return Halves(Vec::Load(reinterpret_cast<const float*>(from))); }
  static Key LoadSixteen(const char* from) { return Halves(_mm512_castsi512_ps(_mm512_maskz_loadu_epi32(0xff, from))); }
  static Sum Add(Sum sum, const Key& key, const float* query) {
    return Vec::Fma(key.odd, Vec::Load(query + 16), Vec::Fma(key.even, Vec::Load(query), sum));
  }
  static void LoadValues(const char* from, int64_t /*stride*/, Values* two) {
    const Key key = Load(from);
    two[0] = key.even;
    two[1] = key.odd;
  }
  static Values LoadSixteenValues(const char* from, int64_t /*stride*/) {
    return Vec::Widen(reinterpret_cast<const uint16_t*>(from));
  }
  static void RoundProbabilities(int, int, int, float*, float*) {}
  static Values LoadProbability(const float* row, int key) { return Vec::Set(row[key]); }
  static Sum AddValues(Sum sum, Values values, Values probability) { return Vec::Fma(values, probability, sum); }
  static void Finish(float, float* sums) { StoreInTurns(sums, Vec::Load(sums), Vec::Load(sums + 16), LanesInTurns()); }

#endif
};

template <>
struct Numbers<int8_t> : Rounded {
  // GCC copies sums between registers, product by product, where their type is not what the instruction adds.
  using Sum = int32_t __attribute__((vector_size(64)));
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
    const __m512i even = Load(from), odd = Load(from + stride);
    two[0] = _mm512_unpacklo_epi16(even, odd);
    two[1] = _mm512_unpackhi_epi16(even, odd);
  }
  static Values LoadSixteenValues(const char* from, int64_t stride) {
    const auto widened = [](const char* at) {
      return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    };
    return PairWords(widened(from), widened(from + stride));
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
