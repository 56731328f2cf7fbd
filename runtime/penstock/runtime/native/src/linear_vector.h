// Linear layers on vector registers, for any instruction set described by a traits class V:
//   Sum                      a register of float32 or int32 sums, kLanes wide
//   Zero(), Store(f, Sum)
//   MulBf16(sum, w, x)       sum += pairs of weights w (16 bits each) times the pair of x's that x points to
//   MulInt8(sum, w, x)       sum += fours of int8 weights times the four x's
//   kXBytes                  bytes of x's elements in bf16 mode: 2 as they are, 4 widened to float32
//   kOffset                  whether x is stored plus 128, as unsigned bytes
// A tile's row holds 16 outputs, so it is 16 / kLanes registers.
#pragma once

#include <immintrin.h>

#include "linear_common.h"

namespace penstock {
namespace {

constexpr int64_t kUnitBytes = 128 * 1024;
constexpr int64_t kPrefetchBytes = 2048;

template <class V>
struct VectorLinear {
  static constexpr int64_t kParts = kBlockOut / V::kLanes;
  static constexpr int64_t kMostRows = V::kLanes == 16 ? 8 : 4;  // that fit in registers

  static int64_t RowBytes(int64_t k, bool int8) { return k * (int8 ? 1 : V::kXBytes); }

  // One tile row after the other over all inputs; kRows rows of x at once.
  template <bool kInt8, int kRows>
  static void Block(const char* tiles, const char* x, int64_t row_bytes, int64_t k, float* sums) {
    constexpr int64_t kGroup = kInt8 ? 4 : 2, kXGroup = kInt8 ? 4 : 2 * V::kXBytes;
    typename V::Sum sum[kRows][kParts];
    for (int r = 0; r < kRows; ++r) {
      for (int p = 0; p < kParts; ++p) sum[r][p] = V::Zero();
    }
    for (int64_t g = 0; g < k / kGroup; ++g) {
      const char* w = tiles + g * 64;
      _mm_prefetch(w + kPrefetchBytes, _MM_HINT_T0);
      for (int p = 0; p < kParts; ++p) {
        for (int r = 0; r < kRows; ++r) {
          if constexpr (kInt8) {
            V::MulInt8(sum[r][p], w + p * V::kLanes * 4, x + r * row_bytes + g * kXGroup);
          } else {
            V::MulBf16(sum[r][p], w + p * V::kLanes * 4, x + r * row_bytes + g * kXGroup);
          }
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int p = 0; p < kParts; ++p) V::Store(sums + r * kBlockOut + p * V::kLanes, sum[r][p]);
    }
  }

  template <bool kInt8>
  static void Rows(int64_t rows, const char* tiles, const char* x, int64_t row_bytes, int64_t k, float* sums) {
    if constexpr (kMostRows == 8) {
      if (rows == 8) return Block<kInt8, 8>(tiles, x, row_bytes, k, sums);
    }
    if (rows >= 4) {
      Block<kInt8, 4>(tiles, x, row_bytes, k, sums);
      if (rows > 4) Rows<kInt8>(rows - 4, tiles, x + 4 * row_bytes, row_bytes, k, sums + 4 * kBlockOut);
    } else if (rows == 3) {
      Block<kInt8, 3>(tiles, x, row_bytes, k, sums);
    } else if (rows == 2) {
      Block<kInt8, 2>(tiles, x, row_bytes, k, sums);
    } else {
      Block<kInt8, 1>(tiles, x, row_bytes, k, sums);
    }
  }

  static void Multiply(const LinearJob& job, int64_t weight, int64_t block, int64_t row, int64_t rows, float* sums) {
    const char* tiles = job.weights[weight].tiles + block * job.BlockBytes();
    const int64_t row_bytes = RowBytes(job.k, job.int8);
    const char* x = static_cast<const char*>(job.x) + row * row_bytes;
    if (job.int8) {
      Rows<true>(rows, tiles, x, row_bytes, job.k, sums);
      Dequantize(job, weight, block, row, rows, sums, V::kOffset);
    } else {
      Rows<false>(rows, tiles, x, row_bytes, job.k, sums);
    }
  }

  static int64_t PerUnit(const LinearJob& job) {
    const int64_t blocks = kUnitBytes / (job.BlockBytes() * (job.gate ? 2 : 1));
    return job.m > 64 || blocks < 1 ? 1 : blocks;
  }

  static int64_t NumUnits(const LinearJob& job) { return CountUnits(job, PerUnit(job)); }

  static void RunUnit(const LinearJob& job, int64_t unit) {
    const Span span = FindUnit(job, unit, PerUnit(job));
    alignas(64) float sums[2][kMostRows * kBlockOut];
    for (int64_t b = span.block; b < span.block + span.count; ++b) {
      for (int64_t row = 0; row < job.m; row += kMostRows) {
        const int64_t rows = job.m - row < kMostRows ? job.m - row : kMostRows;
        Multiply(job, span.weight, b, row, rows, sums[0]);
        if (job.gate) {
          Multiply(job, 1, b, row, rows, sums[1]);
          FinishGate(job, b, row, rows, sums[0], sums[1]);
        } else {
          Finish(job, span.weight, b, row, rows, sums[0], nullptr);
        }
      }
    }
  }

  static int64_t XBytes(int64_t m, int64_t k, bool int8) { return m * RowBytes(k, int8); }

  static void PutRows(const LinearInput& input, int64_t block, const LinearJob& job, void* x, float* x_scale,
                      float* row) {
    const int64_t k = job.k, first = block * 16, count = job.m - first < 16 ? job.m - first : 16;
    char* out = static_cast<char*>(x) + first * RowBytes(k, job.int8);
    for (int64_t r = 0; r < count; ++r, out += RowBytes(k, job.int8)) {
      LoadRow(input, first + r, k, row);
      if (job.int8) {
        const float peak = RowPeak(row, k);
        x_scale[first + r] = peak / 127.0f;
        Quantize(row, k, peak > 0 ? 127.0f / peak : 0.0f, reinterpret_cast<int8_t*>(out));
        if constexpr (V::kOffset) {
          for (int64_t i = 0; i < k; ++i) out[i] = static_cast<char>(out[i] ^ 0x80);  // + 128, as unsigned
        }
      } else if constexpr (V::kXBytes == 2) {
        for (int64_t i = 0; i < k; i += 16) StoreBf16(reinterpret_cast<uint16_t*>(out) + i, Load(row + i));
      } else {
        // Rounded to bf16 all the same: every machine computes the same model.
        for (int64_t i = 0; i < k; i += 16) {
          uint16_t rounded[16];
          StoreBf16(rounded, Load(row + i));
          Store(reinterpret_cast<float*>(out) + i, LoadBf16(rounded));
        }
      }
    }
  }

  static const LinearKernel& Kernel() {
    static const LinearKernel kernel{NumUnits, RunUnit, XBytes, PutRows};
    return kernel;
  }
};

inline int32_t Four(const char* x) {
  int32_t value;
  memcpy(&value, x, 4);
  return value;
}

}  // namespace
}  // namespace penstock
