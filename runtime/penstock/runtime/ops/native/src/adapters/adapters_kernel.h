// The kernel of adapters.h, compiled once per instruction set.
#pragma once

#include "adapters/adapters.h"
#include "common/lanes.h"

namespace penstock {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kSums = 4;  // of every fourth input, so that additions need not wait for each other

inline float Widened(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float wide;
  __builtin_memcpy(&wide, &bits, 4);
  return wide;
}

template <int N>
inline void DownRows(const AdapterJob& job, const AdaptedRows& rows, int64_t part) {
  const uint16_t* a = rows.matrices + part * job.k * job.rank;
  for (int64_t r = 0; r < job.rank; r += kLanes) {
    Lanes sums[N][kSums];
    for (int n = 0; n < N; ++n) {
      for (int64_t s = 0; s < kSums; ++s) {
        sums[n][s] = Fill(0.0f);
      }
    }
    for (int64_t i = 0; i < job.k; i += kSums) {
      for (int64_t s = 0; s < kSums; ++s) {
        const Lanes values = LoadBf16(a + (i + s) * job.rank + r);
        for (int n = 0; n < N; ++n) {
          sums[n][s] = Add(sums[n][s], Mul(Fill(Widened(rows.x[n][i + s])), values));
        }
      }
    }
    for (int n = 0; n < N; ++n) {
      Store(rows.small[n] + part * job.rank + r, Add(Add(sums[n][0], sums[n][1]), Add(sums[n][2], sums[n][3])));
    }
  }
}

template <int N, int64_t kBlocks>
inline void UpBlocks(const AdapterJob& job, const AdaptedRows& rows, int64_t part, const uint16_t* b, int64_t outputs,
                     int64_t column, int64_t at) {
  Lanes sums[N][kBlocks];
  for (int n = 0; n < N; ++n) {
    for (int64_t j = 0; j < kBlocks; ++j) {
      sums[n][j] = Fill(0.0f);
    }
  }
  for (int64_t r = 0; r < job.rank; ++r) {
    Lanes values[kBlocks];
    for (int64_t j = 0; j < kBlocks; ++j) {
      values[j] = LoadBf16(b + r * outputs + at + j * kLanes);
    }
    for (int n = 0; n < N; ++n) {
      const Lanes small = Fill(rows.small[n][part * job.rank + r]);
      for (int64_t j = 0; j < kBlocks; ++j) {
        sums[n][j] = Add(sums[n][j], Mul(small, values[j]));
      }
    }
  }
  for (int n = 0; n < N; ++n) {
    for (int64_t j = 0; j < kBlocks; ++j) {
      Store(rows.y[n] + column + at + j * kLanes, sums[n][j]);
    }
  }
}

template <int N>
inline void UpRows(const AdapterJob& job, const AdaptedRows& rows, int64_t part, const uint16_t* b, int64_t outputs,
                   int64_t column, int64_t first, int64_t last) {
  constexpr int64_t kBlocks = 2;  // a line of B
  int64_t at = first;
  for (; at + kBlocks * kLanes <= last; at += kBlocks * kLanes) {
    UpBlocks<N, kBlocks>(job, rows, part, b, outputs, column, at);
  }
  for (; at < last; at += kLanes) {
    UpBlocks<N, 1>(job, rows, part, b, outputs, column, at);
  }
}

inline void Down(const AdapterJob& job, const AdaptedRows& rows, int64_t part) {
  switch (rows.count) {
    case 1:
      return DownRows<1>(job, rows, part);
    case 2:
      return DownRows<2>(job, rows, part);
    case 3:
      return DownRows<3>(job, rows, part);
    default:
      return DownRows<4>(job, rows, part);
  }
}

inline void Up(const AdapterJob& job, const AdaptedRows& rows, int64_t part, const uint16_t* b, int64_t outputs,
               int64_t column, int64_t first, int64_t last) {
  switch (rows.count) {
    case 1:
      return UpRows<1>(job, rows, part, b, outputs, column, first, last);
    case 2:
      return UpRows<2>(job, rows, part, b, outputs, column, first, last);
    case 3:
      return UpRows<3>(job, rows, part, b, outputs, column, first, last);
    default:
      return UpRows<4>(job, rows, part, b, outputs, column, first, last);
  }
}

}  // namespace
}  // namespace penstock
