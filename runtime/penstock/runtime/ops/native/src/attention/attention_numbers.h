// What the products of attention_lanes.h consist of, as far as all sets of instructions share it;
// attention_numbers_avx2.h and attention_numbers_avx512.h have the rest.
#pragma once

#include <cstring>

#include "attention/attention.h"
#include "common/common.h"
#include "common/int8.h"
#include "common/vec.h"

namespace penstock {
namespace {

// The room for a query's dims: what two vectors of float32 hold, once or several times.
constexpr int64_t PaddedDims(int64_t dim) { return RoundUp(dim, 2 * Vec::kWidth); }

// How numbers of a cache of T are multiplied. Every set of instructions has its own:
//   Query, Key           a number of a query as it is multiplied; numbers of a key
//   Sum, Values          a vector of sums; a vector of values
//   kDims                how many dims Load takes, and LoadValues, which makes two vectors of them
//   kKeys                of how many keys values are multiplied at once: if two, probabilities are 16 bits wide
//   PrepareQuery         rounds a query's numbers to Query, zeros up to PaddedDims(dim), and returns their scale
//   Zero, Load, Add      no sum yet; the numbers of a key; a sum with their products with a query's
//   AddHalves, AddPairs, AddLanes   of two, two and one sums: four of them become the sums of their lanes
//   LoadValues           the values of kKeys keys, `stride` bytes apart
//   RoundProbabilities   rounds those of keys [first, last) of `count` columns, in place, with a scale for each column
//   LoadProbability      the probabilities of kKeys keys from `key` on
//   AddValues            a sum with the products of values and the probabilities of their keys
//   LoadSums, StoreSums  a vector of sums from and to memory
//   Finish               turns the sums of kDims dims into float32, in the order of dims
// LoadSixteen takes the last 16 dims of a key if their number is no multiple of 32. LoadSixteenValues and FinishSixteen
// do so for values, and exist where kDims is 32.
template <typename T>
struct Numbers;

// Numbers<uint16_t> where bf16 is multiplied as float32.
struct AsFloat32 {
  using Query = float;
  using Sum = Vec::F;
  using Values = Vec::F;
  struct Key {
    Vec::F even, odd;
  };
  static constexpr int kDims = 2 * Vec::kWidth;
  static constexpr int kKeys = 1;
  static Key Halves(Vec::F pairs) { return {Vec::EvenHalves(pairs), Vec::OddHalves(pairs)}; }
  static Key Load(const char* from) { return Halves(Vec::Load(reinterpret_cast<const float*>(from))); }
  static Key LoadSixteen(const char* from) {
#ifdef __AVX512F__
    return Halves(_mm512_castsi512_ps(_mm512_maskz_loadu_epi32(0xff, from)));
#else
    return Load(from);
#endif
  }
  // Of the dims of each Load the even ones first.
  static float PrepareQuery(const uint16_t* from, int64_t dim, float* to) {
    for (int64_t d = 0; d < dim; d += kDims) {
      const auto* at = reinterpret_cast<const char*>(from + d);
      const Key numbers = d + kDims <= dim ? Load(at) : LoadSixteen(at);
      Vec::Store(to + d, numbers.even);
      Vec::Store(to + d + Vec::kWidth, numbers.odd);
    }
    return 1.0f;
  }
  static Sum Add(Sum sum, const Key& key, const float* query) {
    return Vec::Fma(key.odd, Vec::Load(query + Vec::kWidth), Vec::Fma(key.even, Vec::Load(query), sum));
  }
  static void LoadValues(const char* from, int64_t /*stride*/, Values* two) {
    const Key numbers = Load(from);
    two[0] = numbers.even;
    two[1] = numbers.odd;
  }
  static void RoundProbabilities(int, int, int, float*, float*) {}
  static Values LoadProbability(const float* row, int key) { return Vec::Set(row[key]); }
  static Sum AddValues(Sum sum, Values values, Values probability) { return Vec::Fma(values, probability, sum); }
  static Sum LoadSums(const float* from) { return Vec::Load(from); }
  static void StoreSums(float* to, Sum sums) { Vec::Store(to, sums); }
};

// The scale of numbers of which the largest, `peak`, became `most`: NaN if one of them is not finite.
inline float ScaleOf(float peak, float most) { return peak <= __FLT_MAX__ ? peak / most : __builtin_nanf(""); }

// The parts of Numbers<int8_t> that all sets of instructions share: queries and probabilities become int16, so that
// sums are exact integers.
struct AsInt16 {
  using Query = int16_t;

  // The largest is such that no sum of products with int8 is 2^31 or more. If a number is not finite, the scale is NaN:
  // an infinite one would bring the sign of an integer that means nothing to scores.
  static float PrepareQuery(const uint16_t* from, int64_t dim, int16_t* to) {
    const auto most = static_cast<float>(Min<int64_t>(32767, INT32_MAX / (127 * dim)));
    const float peak = RowPeak(from, dim), inverse = Inverse(peak, most);
    for (int64_t d = 0; d < dim; d += 16) {
      StoreInt16(to + d, Mul(Widened(from + d), Fill(inverse)));
    }
    memset(to + dim, 0, (PaddedDims(dim) - dim) * sizeof *to);
    return ScaleOf(peak, most);
  }

  // The probabilities are those times their values' scales. A scale is NaN if one of them is not finite. Products with
  // 256 values of int8 add up to less than 2^31. Each is rounded by at most 2^-16 of the largest of the column's split:
  // so all 256 together change the split's sum by no more than the rounding of the largest one's value to int8 may.
  static void RoundProbabilities(int count, int first, int last, float* probabilities, float* scales) {
    constexpr float kMost = 32767.0f;
    for (int c = 0; c < count; ++c) {
      float* row = probabilities + c * kSplit;
      const float peak = RowPeak(row + first, last - first), inverse = Inverse(peak, kMost);
      scales[c] = ScaleOf(peak, kMost);
      auto* to = reinterpret_cast<int16_t*>(row);
      for (int key = first; key < last; key += 16) {
        StoreInt16(to + key, Mul(Load(row + key), Fill(inverse)));
      }
    }
  }
};

// Two probabilities, of keys `key` and `key` + 1 of a column, as they lie in memory.
inline int32_t TwoProbabilities(const float* row, int key) {
  int32_t two;
  memcpy(&two, reinterpret_cast<const int16_t*>(row) + key, 4);
  return two;
}

}  // namespace
}  // namespace penstock
