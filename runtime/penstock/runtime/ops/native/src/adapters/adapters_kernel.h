// The kernel of adapters.h, compiled once per instruction set.
#pragma once

#include <type_traits>

#include "adapters/adapters.h"
#include "common/lanes.h"

namespace penstock {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kSums = 2;  // so that additions need not wait for each other

// The rows of x as float32, side by side for each input: [k][N]. So one input of all rows is one line.
template <int N>
void Widen(const AdaptedRows& group, int64_t k, float* wide) {
  for (int n = 0; n < N; ++n) {
    const AdaptedRow& row = group.rows[n];
    const Lanes factor = Fill(row.factor);
    for (int64_t i = 0; i < k; i += kLanes) {
      const Lanes values = LoadBf16(row.x + i);
      float scaled[kLanes];
      Store(scaled, row.factor == 1.0f ? values : RoundToBf16(Mul(values, factor)));
      for (int64_t j = 0; j < kLanes; ++j) {
        wide[(i + j) * N + n] = scaled[j];
      }
    }
  }
}

template <int N>
inline void DownRows(const AdaptedRows& group, int64_t k, int64_t rank, int64_t part, float* wide) {
  Widen<N>(group, k, wide);
  const uint16_t* a = group.rows[0].matrices + part * k * rank;
  for (int64_t r = 0; r < rank; r += kLanes) {
    Lanes sums[N][kSums];
    for (int n = 0; n < N; ++n) {
      for (int64_t s = 0; s < kSums; ++s) {
        sums[n][s] = Fill(0.0f);
      }
    }
    for (int64_t i = 0; i < k; i += kSums) {
      for (int64_t s = 0; s < kSums; ++s) {
        const Lanes values = LoadBf16(a + (i + s) * rank + r);
        for (int n = 0; n < N; ++n) {
          sums[n][s] = MulAdd(Fill(wide[(i + s) * N + n]), values, sums[n][s]);
        }
      }
    }
    for (int n = 0; n < N; ++n) {
      Store(group.small + n * group.of_row + part * rank + r, Add(sums[n][0], sums[n][1]));
    }
  }
}

template <int N, int64_t kBlocks>
inline void UpBlocks(const AdaptedRows& group, int64_t rank, int64_t part, const uint16_t* b, int64_t outputs,
                     int64_t column, int64_t at) {
  Lanes sums[N][kBlocks];
  for (int n = 0; n < N; ++n) {
    for (int64_t j = 0; j < kBlocks; ++j) {
      sums[n][j] = Fill(0.0f);
    }
  }
  for (int64_t r = 0; r < rank; ++r) {
    Lanes values[kBlocks];
    for (int64_t j = 0; j < kBlocks; ++j) {
      values[j] = LoadBf16(b + r * outputs + at + j * kLanes);
    }
    for (int n = 0; n < N; ++n) {
      const Lanes small = Fill(group.small[n * group.of_row + part * rank + r]);
      for (int64_t j = 0; j < kBlocks; ++j) {
        sums[n][j] = MulAdd(small, values[j], sums[n][j]);
      }
    }
  }
  for (int n = 0; n < N; ++n) {
    for (int64_t j = 0; j < kBlocks; ++j) {
      Store(group.rows[n].y + column + at + j * kLanes, sums[n][j]);
    }
  }
}

template <int N>
inline void UpRows(const AdaptedRows& group, int64_t rank, int64_t part, const uint16_t* b, int64_t outputs,
                   int64_t column, int64_t first, int64_t last) {
  constexpr int64_t kBlocks = 2;  // a line of B
  int64_t at = first;
  for (; at + kBlocks * kLanes <= last; at += kBlocks * kLanes) {
    UpBlocks<N, kBlocks>(group, rank, part, b, outputs, column, at);
  }
  for (; at < last; at += kLanes) {
    UpBlocks<N, 1>(group, rank, part, b, outputs, column, at);
  }
}

// Calls `function` with the number of rows as a constant.
template <int N = 1, typename Function>
inline void WithCount(int64_t count, Function&& function) {
  if constexpr (N < kRowsTogether) {
    if (count != N) {
      return WithCount<N + 1>(count, function);
    }
  }
  function(std::integral_constant<int, N>());
}

inline void Down(const AdaptedRows& group, int64_t k, int64_t rank, int64_t part, float* wide) {
  WithCount(group.count, [&](auto n) { DownRows<decltype(n)::value>(group, k, rank, part, wide); });
}

inline void Up(const AdaptedRows& group, int64_t rank, int64_t part, const uint16_t* b, int64_t outputs, int64_t column,
               int64_t first, int64_t last) {
  WithCount(group.count,
            [&](auto n) { UpRows<decltype(n)::value>(group, rank, part, b, outputs, column, first, last); });
}

}  // namespace
}  // namespace penstock
