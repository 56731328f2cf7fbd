// How keys are mixed before they are rounded to int8, and queries with them: `spread` of kv_rows.py, with its bits. In
// an unnamed namespace, like lanes.h.
#pragma once

#include <cmath>

#include "attention/attention.h"
#include "common/int8.h"
#include "common/lanes.h"

namespace penstock {
namespace {

constexpr int64_t kMostBlock = 512;  // channels: the largest power of two that is not above kMostDims

// What the channels of a block are multiplied by first: -1 where two neighbouring bits of the channel's number are set
// an odd number of times, else 1.
struct SpreadSigns {
  alignas(64) float of[kMostBlock];
  constexpr SpreadSigns() : of() {
    for (int i = 0; i < kMostBlock; ++i) {
      int pairs = 0;
      for (int left = i & (i >> 1); left; left >>= 1) {
        pairs += left & 1;
      }
      of[i] = pairs % 2 ? -1.0f : 1.0f;
    }
  }
};
constexpr SpreadSigns kSpreadSigns;

// The sums of lanes that are kApart apart, and in the second lane of each two their difference.
template <int kApart>
inline Lanes AddApart(Lanes a) {
  alignas(64) float signs[16];
  for (int i = 0; i < 16; ++i) {
    signs[i] = i & kApart ? -1.0f : 1.0f;
  }
  return MulAdd(a, Load(signs), Swapped<kApart>(a));
}

// Spreads a key or a query of float32 or bf16 [dim], a multiple of 16, no more than kMostDims.
template <typename T>
inline void Spread(const T* from, int64_t dim, float* to) {
  for (int64_t size = kMostBlock; dim > 0; dim -= size, from += size, to += size) {
    while (size > dim) {
      size /= 2;
    }
    for (int64_t i = 0; i < size; i += 16) {
      const Lanes of_one = AddApart<1>(Mul(Widened(from + i), Load(kSpreadSigns.of + i)));
      Store(to + i, AddApart<8>(AddApart<4>(AddApart<2>(of_one))));
    }
    for (int64_t apart = 16; apart < size; apart *= 2) {
      for (int64_t begin = 0; begin < size; begin += 2 * apart) {
        for (int64_t i = begin; i < begin + apart; i += 16) {
          const Lanes a = Load(to + i), b = Load(to + i + apart);
          Store(to + i, Add(a, b));
          Store(to + i + apart, Sub(a, b));
        }
      }
    }
    const Lanes scale = Fill(static_cast<float>(1.0 / std::sqrt(static_cast<double>(size))));
    for (int64_t i = 0; i < size; i += 16) {
      Store(to + i, Mul(Load(to + i), scale));
    }
  }
}

// Spreads a query, and rounds it to what queries are.
inline void SpreadQuery(const AttentionJob& job, const char* from, char* to) {
  if (!job.bf16) {
    Spread(reinterpret_cast<const float*>(from), job.dim, reinterpret_cast<float*>(to));
    return;
  }
  alignas(64) float wide[kMostDims];
  Spread(reinterpret_cast<const uint16_t*>(from), job.dim, wide);
  for (int64_t i = 0; i < job.dim; i += 16) {
    StoreBf16(reinterpret_cast<uint16_t*>(to) + i, Load(wide + i));
  }
}

}  // namespace
}  // namespace penstock
