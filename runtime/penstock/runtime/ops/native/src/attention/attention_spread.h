// How keys are mixed before they are rounded to int8, and queries with them: `spread` of kv_rows.py, with its bits. In
// an unnamed namespace, like lanes.h.
#pragma once

#include <cmath>
#include <type_traits>

#include "attention/attention.h"
#include "common/int8.h"
#include "common/lanes.h"

namespace penstock {
namespace {

constexpr int kMostBlock = 512;  // channels: the largest power of two that is not above kMostDims

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

// Makes sums and differences of vectors that are kApart apart.
template <int kApart, int kVecs>
inline void AddVecsApart(Lanes* vecs) {
  for (int i = 0; i < kVecs / 2; ++i) {
    Lanes &a = vecs[i / kApart * 2 * kApart + i % kApart], &b = *(&a + kApart);
    const Lanes sum = Add(a, b);
    b = Sub(a, b);
    a = sum;
  }
}

// Spreads a block of kVecs times 16 channels.
template <int kVecs, typename T>
[[gnu::noinline]] void SpreadBlock(const T* from, float* to) {
  Lanes vecs[kVecs];
  for (int i = 0; i < kVecs; ++i) {
    vecs[i] = AddApart<1>(Mul(Widened(from + 16 * i), Load(kSpreadSigns.of + 16 * i)));
    vecs[i] = AddApart<8>(AddApart<4>(AddApart<2>(vecs[i])));
  }
  if constexpr (kVecs > 1) {
    AddVecsApart<1, kVecs>(vecs);
  }
  if constexpr (kVecs > 2) {
    AddVecsApart<2, kVecs>(vecs);
  }
  if constexpr (kVecs > 4) {
    AddVecsApart<4, kVecs>(vecs);
  }
  if constexpr (kVecs > 8) {
    AddVecsApart<8, kVecs>(vecs);
  }
  if constexpr (kVecs > 16) {
    AddVecsApart<16, kVecs>(vecs);
  }
  const Lanes scale = Fill(static_cast<float>(1.0 / std::sqrt(16.0 * kVecs)));
  for (int i = 0; i < kVecs; ++i) {
    Store(to + 16 * i, Mul(vecs[i], scale));
  }
}

// Spreads a key or a query of float32 or bf16 [dim], a multiple of 16, no more than kMostDims.
template <typename T>
inline void Spread(const T* from, int64_t dim, float* to) {
  const auto blocks = [&](auto vecs) {
    constexpr int kVecs = decltype(vecs)::value, kSize = 16 * kVecs;
    for (; dim >= kSize; dim -= kSize, from += kSize, to += kSize) {
      SpreadBlock<kVecs>(from, to);
    }
  };
  blocks(std::integral_constant<int, 32>{});
  blocks(std::integral_constant<int, 16>{});
  blocks(std::integral_constant<int, 8>{});
  blocks(std::integral_constant<int, 4>{});
  blocks(std::integral_constant<int, 2>{});
  blocks(std::integral_constant<int, 1>{});
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
