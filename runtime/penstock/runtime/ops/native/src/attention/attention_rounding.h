// What attention multiplies where sums over an int8 cache are exact integers (attention_lanes.h): queries and
// probabilities that are rounded to int16.
#pragma once

#include <cstring>

#include "attention/attention.h"
#include "common/common.h"
#include "common/int8.h"

namespace penstock {
namespace {

// What the products of attention_lanes.h consist of, for a cache of T. Every set of instructions has its own:
//   Query, Sum, Values   a number of a query as it is multiplied; a vector of sums; a vector of values
//   kDims, kKeys         how many dims Load and LoadValues take, in one and in two vectors, and of how many keys the
//                        values are multiplied at once. If there are two, probabilities are 16 bits wide
//   PrepareQuery         rounds a query's numbers to Query, returns their scale; Query has room for PaddedDims(dim)
//   Load, Add            the numbers of a key; a sum with their products with a query's
//   AddHalves, AddPairs, AddLanes   of two, two and one sums: four of them become the sums of their lanes
//   LoadValues           the values of kKeys keys, `stride` bytes apart
//   RoundProbabilities   rounds those of keys [first, last) of `count` columns, in place, with a scale for each column
//   AddValues            a sum with the products of values and the probabilities of their keys
//   Finish               turns the sums of kDims dims into float32, in the order of dims
// Those with Sixteen in their name take the last 16 dims, if kDims is 32 and the number of dims no multiple of it.
template <typename T>
struct Numbers;

// The parts of Numbers<int8_t> that all sets of instructions share.
struct Rounded {
  using Query = int16_t;

  // The largest is such that no sum of products with int8 is 2^31 or more. If a number is not finite, the scale is NaN:
  // an infinite one would bring the sign of an integer that means nothing to scores.
  static float PrepareQuery(const uint16_t* from, int64_t dim, int16_t* to) {
    const auto most = static_cast<float>(Min<int64_t>(32767, INT32_MAX / (127 * dim)));
    const float peak = RowPeak(from, dim), inverse = Inverse(peak, most);
    for (int64_t d = 0; d < dim; d += 16) {
      StoreInt16(to + d, Mul(Widened(from + d), Fill(inverse)));
    }
    return peak <= __FLT_MAX__ ? peak / most : __builtin_nanf("");
  }

  // The probabilities are those times their values' scales. A scale is NaN if one of them is not finite. Products with
  // 256 values of int8 add up to less than 2^31. Each is rounded by at most 2^-16 of the largest of the column's split:
  // so all 256 together change the split's sum by no more than the rounding of the largest one's value to int8 may.
  static void RoundProbabilities(int count, int first, int last, float* probabilities, float* scales) {
    constexpr float kMost = 32767.0f;
    for (int c = 0; c < count; ++c) {
      float* row = probabilities + c * kSplit;
      const float peak = RowPeak(row + first, last - first), inverse = Inverse(peak, kMost);
      scales[c] = peak <= __FLT_MAX__ ? peak / kMost : __builtin_nanf("");
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
