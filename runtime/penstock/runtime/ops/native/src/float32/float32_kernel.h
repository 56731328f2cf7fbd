// The kernels of float32.h, compiled once per instruction set.
#pragma once

#include "common/activate.h"
#include "common/common.h"
#include "common/lanes.h"
#include "common/rms.h"
#include "common/scratch.h"
#include "common/transpose.h"
#include "float32/float32.h"

namespace penstock {
namespace {

constexpr int64_t kLanes = 16;
// Rows of x and blocks of outputs whose sums are in registers together: those of AVX-512 are twice as many, and as
// wide.
#if defined(__AVX512F__)
constexpr int kRows = 12, kBlocks = 2;
#else
constexpr int kRows = 6, kBlocks = 1;
#endif

// Multiplies R rows, x [k][R], by B blocks, and writes the sums [R][B][16]. It is not inlined, so that its sums stay in
// registers whatever its caller keeps there.
template <int R, int B>
__attribute__((noinline)) void MultiplyPanel(const float* x, const float* blocks, int64_t k, float* sums) {
  Lanes sum[R][B];
  for (int r = 0; r < R; ++r) {
    for (int b = 0; b < B; ++b) {
      sum[r][b] = Fill(0.0f);
    }
  }
  for (int64_t i = 0; i < k; ++i, x += R, blocks += kLanes) {
    Lanes weights[B];
    for (int b = 0; b < B; ++b) {
      weights[b] = Load(blocks + b * k * kLanes);
    }
    for (int r = 0; r < R; ++r) {
      const Lanes value = Fill(x[r]);
      for (int b = 0; b < B; ++b) {
        sum[r][b] = MulAdd(weights[b], value, sum[r][b]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int b = 0; b < B; ++b) {
      Store(sums + (r * B + b) * kLanes, sum[r][b]);
    }
  }
}

// MultiplyPanel for any number of rows up to R.
template <int B, int R = kRows>
void AnyPanel(int64_t rows, const float* x, const float* blocks, int64_t k, float* sums) {
  if constexpr (R > 1) {
    if (rows < R) {
      return AnyPanel<B, R - 1>(rows, x, blocks, k, sums);
    }
  }
  MultiplyPanel<R, B>(x, blocks, k, sums);
}

// Writes results of B blocks for `rows` rows.
template <int B>
inline void FinishPanel(const Float32Job& job, int64_t row, int64_t rows, int64_t block, const float* sums) {
  Lanes bias[B];
  float* y[B];
  int64_t stride[B];
  for (int b = 0; b < B; ++b) {
    const int64_t output = (block + b) * kLanes;
    bias[b] = job.bias ? Load(job.bias + output) : Fill(0.0f);
    const Float32Part* part = job.parts;
    while (output >= part->begin + part->n) {
      ++part;
    }
    stride[b] = part->n;
    y[b] = part->y + row * part->n + output - part->begin;
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int b = 0; b < B; ++b, sums += kLanes) {
      Lanes value = Add(Load(sums), bias[b]);
      if (job.plain != Plain::kNone) {
        value = Activate(job.plain, value);
      }
      if (job.residual) {
        value = Add(Load(job.residual + (row + r) * job.n + (block + b) * kLanes), value);
      }
      Store(y[b] + r * stride[b], value);
    }
  }
}

// The rows are divided into panels of at most kRows, as evenly as possible. Each panel is transposed once, and then a
// block's weights, which come from the second-level cache from the second panel on, are multiplied by all panels.
inline void MultiplyRows(const Float32Job& job, int64_t row, int64_t rows, int64_t block, int64_t blocks) {
  static_assert(kRows <= kTransposedRows, "TransposeWords takes a whole panel");
  const int64_t panels = CeilDiv(rows, kRows);
  const auto begin = [&](int64_t panel) { return panel * rows / panels; };
  auto* x = reinterpret_cast<float*>(Scratch<struct Float32Rows>(rows * job.k * 4));
  for (int64_t p = 0; p < panels; ++p) {
    const auto* from = reinterpret_cast<const uint32_t*>(job.x + (row + begin(p)) * job.k);
    TransposeWords(from, job.k, begin(p + 1) - begin(p), job.k, reinterpret_cast<uint32_t*>(x + begin(p) * job.k));
  }
  alignas(64) float sums[kRows * kBlocks * kLanes];
  for (int64_t b = block; b < block + blocks;) {
    const bool together = b + kBlocks <= block + blocks;
    const float* weights = job.weight + b * job.k * kLanes;
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t first = begin(p), count = begin(p + 1) - first;
      if (together) {
        AnyPanel<kBlocks>(count, x + first * job.k, weights, job.k, sums);
        FinishPanel<kBlocks>(job, row + first, count, b, sums);
      } else {
        AnyPanel<1>(count, x + first * job.k, weights, job.k, sums);
        FinishPanel<1>(job, row + first, count, b, sums);
      }
    }
    b += together ? kBlocks : 1;
  }
}

// Layer norm (Ba et al. 2016) of rows of y, in place.
inline void NormalizeRows(const Float32Job& job, int64_t row, int64_t rows) {
  const Lanes offset = Fill(job.offset);
  for (float* y = job.parts[0].y + row * job.n; rows > 0; --rows, y += job.n) {
    Lanes total = Fill(0.0f), squares = Fill(0.0f);
    for (int64_t i = 0; i < job.n; i += kLanes) {
      total = Add(total, Load(y + i));
    }
    const Lanes mean = Fill(Total(total) / static_cast<float>(job.n));
    for (int64_t i = 0; i < job.n; i += kLanes) {
      const Lanes value = Sub(Load(y + i), mean);
      squares = Add(squares, Mul(value, value));
    }
    const Lanes inverse = Fill(InverseRms(squares, job.n, job.eps));
    for (int64_t i = 0; i < job.n; i += kLanes) {
      Lanes value = Mul(Sub(Load(y + i), mean), inverse);
      if (job.norm) {
        value = Mul(value, Add(offset, Load(job.norm + i)));
      }
      if (job.norm_bias) {
        value = Add(value, Load(job.norm_bias + i));
      }
      Store(y + i, value);
    }
  }
}

}  // namespace
}  // namespace penstock
