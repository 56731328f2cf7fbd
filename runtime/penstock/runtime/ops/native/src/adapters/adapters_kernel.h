// The kernel of adapters.h, compiled once per instruction set.
#pragma once

#include <type_traits>

#include "adapters/adapters.h"
#include "common/lanes.h"

namespace penstock {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kSums = 2;    // so that additions need not wait for each other
constexpr int64_t kBlocks = 2;  // outputs of a line of B, in Lanes

// Rows whose sums fit into the registers: two Lanes for each. With AVX2 these are four of 16 registers.
#if defined(__AVX512F__)
constexpr int64_t kRegisterRows = kRowsTogether;
#else
constexpr int64_t kRegisterRows = 3;
#endif

// How far ahead matrices are fetched into the cache, in bytes: those of an adapter that one row alone has come from
// memory once, and the processor's own prefetching follows neither short sweeps nor many rows at once.
constexpr int64_t kDownAhead = 1024, kUpAhead = 128;

inline void Fetch(const uint16_t* values, int64_t bytes_ahead) {
  __builtin_prefetch(reinterpret_cast<const char*>(values) + bytes_ahead);
}

// The rows of x as float32.
inline void Widen(const AdaptedRows& group, int64_t k, float* wide) {
  for (int64_t n = 0; n < group.count; ++n, wide += WideStride(k)) {
    const AdaptedRow& row = group.rows[n];
    const Lanes factor = Fill(row.factor);
    for (int64_t i = 0; i < k; i += kLanes) {
      const Lanes values = LoadBf16(row.x + i);
      Store(wide + i, row.factor == 1.0f ? values : RoundToBf16(Mul(values, factor)));
    }
  }
}

// small of N rows, from `row` on, and of one part.
template <int N>
inline void DownRows(const AdaptedRows& group, int64_t row, int64_t k, int64_t rank, int64_t part, const float* wide) {
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
      Fetch(a + i * rank + r, kDownAhead);
      for (int64_t s = 0; s < kSums; ++s) {
        const Lanes values = LoadBf16(a + (i + s) * rank + r);
        for (int n = 0; n < N; ++n) {
          sums[n][s] = MulAdd(Fill(wide[n * stride + i + s]), values, sums[n][s]);
        }
      }
    }
    for (int n = 0; n < N; ++n) {
      Store(group.small + (row + n) * group.of_row + part * rank + r, Add(sums[n][0], sums[n][1]));
    }
  }
}

// The outputs from `at` on of N rows, from `row` on: kCount Lanes of each.
template <int N, int64_t kCount>
inline void UpBlock(const AdaptedRows& group, int64_t row, int64_t rank, int64_t part, const uint16_t* b,
                    int64_t outputs, int64_t column, int64_t at) {
  const float* small = group.small + row * group.of_row + part * rank;
  Lanes sums[N][kCount];
  for (int n = 0; n < N; ++n) {
    for (int64_t j = 0; j < kCount; ++j) {
      sums[n][j] = Fill(0.0f);
    }
  }
  for (int64_t r = 0; r < rank; ++r) {
    Lanes values[kCount];
    Fetch(b + r * outputs + at, kUpAhead);
    for (int64_t j = 0; j < kCount; ++j) {
      values[j] = LoadBf16(b + r * outputs + at + j * kLanes);
    }
    for (int n = 0; n < N; ++n) {
      const Lanes factor = Fill(small[n * group.of_row + r]);
      for (int64_t j = 0; j < kCount; ++j) {
        sums[n][j] = MulAdd(factor, values[j], sums[n][j]);
      }
    }
  }
  for (int n = 0; n < N; ++n) {
    for (int64_t j = 0; j < kCount; ++j) {
      Store(group.rows[row + n].y + column + at + j * kLanes, sums[n][j]);
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

// Calls `function` with the first row, and with the number of rows as a constant, for all rows of a group.
template <typename Function>
inline void ForRows(const AdaptedRows& group, Function&& function) {
  for (int64_t row = 0; row < group.count; row += kRegisterRows) {
    WithCount(group.count - row < kRegisterRows ? group.count - row : kRegisterRows,
              [&](auto count) { function(row, count); });
  }
}

inline void Down(const AdaptedRows& group, int64_t k, int64_t rank, int64_t first, int64_t last, float* wide) {
  Widen(group, k, wide);
  for (int64_t part = first; part < last; ++part) {
    ForRows(group, [&](int64_t row, auto count) { DownRows<decltype(count)::value>(group, row, k, rank, part, wide); });
  }
}

inline void Up(const AdaptedRows& group, int64_t rank, int64_t part, const uint16_t* b, int64_t outputs, int64_t column,
               int64_t first, int64_t last) {
  ForRows(group, [&](int64_t row, auto count) {
    constexpr int kCount = decltype(count)::value;
    int64_t at = first;
    for (; at + kBlocks * kLanes <= last; at += kBlocks * kLanes) {
      UpBlock<kCount, kBlocks>(group, row, rank, part, b, outputs, column, at);
    }
    for (; at < last; at += kLanes) {
      UpBlock<kCount, 1>(group, row, rank, part, b, outputs, column, at);
    }
  });
}

}  // namespace
}  // namespace penstock
