// The kernel of adapters.h, compiled once per instruction set. In an unnamed namespace, like lanes.h.
#pragma once

#include <type_traits>

#include "adapters/adapters.h"
#include "common/lanes.h"
#include "linear/linear_common.h"

namespace penstock {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kSums = 2;  // so that additions need not wait for each other

// Rows whose sums fit into the registers: two Lanes for each. With AVX2 these are four of 16 registers.
#if defined(__AVX512F__)
constexpr int64_t kRegisterRows = kRowsTogether;
#else
constexpr int64_t kRegisterRows = 3;
#endif

// How far ahead A is fetched into the cache, in bytes: that of an adapter which one row alone has comes from memory
// once, and the processor's own prefetching does not follow short sweeps.
constexpr int64_t kBytesAhead = 1024;

// The rows of x, rounded to bf16, as float32.
inline void Widen(const AdaptedGroup& group, int64_t k, float* wide) {
  for (int64_t n = 0; n < group.count; ++n, wide += WideStride(k)) {
    EachOfRow(*group.rows[n].input, group.rows[n].number, k,
              [&](int64_t i, Lanes value) { Store(wide + i, RoundToBf16(value)); });
  }
}

// small of N rows, from `row` on, and of one part.
template <int N>
inline void MultiplyRows(const AdaptedGroup& group, int64_t row, int64_t k, int64_t rank, int64_t part,
                         const float* wide) {
  const uint16_t* a = group.rows[0].matrices + part * k * rank;
  const int64_t stride = WideStride(k);
  wide += row * stride;
  for (int64_t r = 0; r < rank; r += kLanes) {
    Lanes sums[N][kSums];
    for (int n = 0; n < N; ++n) {
      for (int64_t s = 0; s < kSums; ++s) {
        sums[n][s] = Fill(0.0f);
      }
    }
    for (int64_t i = 0; i < k; i += kSums) {
      __builtin_prefetch(reinterpret_cast<const char*>(a + i * rank + 2 * r) + kBytesAhead);
      Lanes values[kSums];
      LoadPairs(a + i * rank + 2 * r, &values[0], &values[1]);
      for (int64_t s = 0; s < kSums; ++s) {
        for (int n = 0; n < N; ++n) {
          sums[n][s] = MulAdd(Fill(wide[n * stride + i + s]), values[s], sums[n][s]);
        }
      }
    }
    for (int n = 0; n < N; ++n) {
      Store(group.rows[row + n].small + part * rank + r, Add(sums[n][0], sums[n][1]));
    }
  }
}

// Calls `function` with the number of rows as a constant.
template <int N = 1, typename Function>
inline void WithCount(int64_t count, Function&& function) {
  if constexpr (N < kRegisterRows) {
    if (count != N) {
      return WithCount<N + 1>(count, function);
    }
  }
  function(std::integral_constant<int, N>());
}

inline void MultiplyByA(const AdaptedGroup& group, int64_t k, int64_t rank, int64_t first, int64_t last, float* wide) {
  Widen(group, k, wide);
  for (int64_t part = first; part < last; ++part) {
    for (int64_t row = 0; row < group.count; row += kRegisterRows) {
      WithCount(Min(group.count - row, kRegisterRows),
                [&](auto count) { MultiplyRows<decltype(count)::value>(group, row, k, rank, part, wide); });
    }
  }
}

}  // namespace
}  // namespace penstock
