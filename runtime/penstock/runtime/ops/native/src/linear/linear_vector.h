// Linear layers on vector registers, for any instruction set described by a traits class V whose members Bf16 and
// Int8 say how words (32 bits) of weights and of x are multiplied:
//   Sum             a register of float32 or int32 sums; kWidth of them
//   kParts          registers for the 16 outputs of a tile's row
//   kSteps          products to a tile's row: each takes one word of every row of x
//   kRows           rows of x at once, what the registers hold
//   kPairedRows     rows of x at once with two blocks, for more than kRows rows; 0: never two blocks for those
//   kForm           what x's words are, see Form
//   LoadSum(const float*), StoreSum(float*, sum), Weights<step>(tile row, part), Word(const uint32_t*),
//   Add(sum, weights, word)
//
// The inputs are cut in stretches, and the rows of x in panels of at most kRows rows. A block's weights of one stretch
// are multiplied by all panels in turn, so that they come from the first-level cache from the second panel on; the sums
// of a panel wait in memory for its next stretch. Meanwhile the next stretch is fetched, a part of it during each
// panel, so that reading memory and multiplying go on at the same time. Where panels have kPairedRows rows, two blocks
// are multiplied together.
//
// x holds stretch by stretch, in each panel by panel, and in a panel words [step][row of the panel]: the words that a
// step multiplies by the same weights lie side by side, and a stretch is read in one ascending sweep. (Rows that lie
// apart by a power of two bytes would share a few sets of the first-level cache.)
//
// An output is one chain of products in ascending order of inputs, whatever the number of rows: its bits depend on
// its own row alone. (A sum in memory is the same float32 as in a register.)
#pragma once

#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "linear/linear_common.h"
#include "linear/linear_panels.h"

namespace penstock {
namespace {

constexpr int64_t kUnitBytes = 128 * 1024;  // of weight in a unit: enough to be worth a claim
constexpr int64_t kPrefetchBytes = 4096;    // how far ahead a weight is prefetched if there is one panel
constexpr int64_t kStretch = 128;           // tile rows: 8 KiB of weights, a quarter of a small first-level cache
constexpr int64_t kRowsAtOnce = 256;        // of x: a stretch of them stays in the second-level cache
constexpr int64_t kFewRows = 2;  // so few have too few sums to fill the latency of an addition with one block

// How far behind the weights in use those lie that are fetched, and how much farther with each tile row, in bytes.
struct Ahead {
  int64_t bytes, step;
};

// Multiplies `tile_rows` tile rows of B blocks by a panel of R rows, and adds the products to the sums [R][16] of each
// block. It is not inlined, so that its sums stay in registers whatever its caller keeps there.
template <class P, int R, int B>
__attribute__((noinline)) void Multiply(const char* const* blocks, const uint32_t* x, int64_t tile_rows, Ahead ahead,
                                        float* const* sums) {
  typename P::Sum sum[B][R][P::kParts];
  const char* tiles[B];
  for (int b = 0; b < B; ++b) {
    tiles[b] = blocks[b];
    for (int r = 0; r < R; ++r) {
      for (int p = 0; p < P::kParts; ++p) {
        sum[b][r][p] = P::LoadSum(sums[b] + r * kBlockOut + p * P::kWidth);
      }
    }
  }
  for (int64_t g = 0; g < tile_rows; ++g) {
    for (int b = 0; b < B; ++b) {
      _mm_prefetch(tiles[b] + ahead.bytes, _MM_HINT_T0);
    }
    ahead.bytes += ahead.step;
    const auto step = [&](auto number) {
      for (int b = 0; b < B; ++b) {
        typename P::Operand weights[P::kParts];
        for (int p = 0; p < P::kParts; ++p) {
          weights[p] = P::template Weights<decltype(number)::value>(tiles[b], p);
        }
        for (int r = 0; r < R; ++r) {
          const typename P::Operand word = P::Word(x + r);
          for (int p = 0; p < P::kParts; ++p) {
            sum[b][r][p] = P::Add(sum[b][r][p], weights[p], word);
          }
        }
      }
      x += R;
    };
    step(std::integral_constant<int, 0>());
    if constexpr (P::kSteps == 2) {
      step(std::integral_constant<int, 1>());
    }
    for (int b = 0; b < B; ++b) {
      tiles[b] += 64;
    }
  }
  for (int b = 0; b < B; ++b) {
    for (int r = 0; r < R; ++r) {
      for (int p = 0; p < P::kParts; ++p) {
        P::StoreSum(sums[b] + r * kBlockOut + p * P::kWidth, sum[b][r][p]);
      }
    }
  }
}

// Multiply for a panel of any size.
template <class P, int B, int R = B == 1 ? P::kRows : Max<int>(P::kPairedRows, kFewRows)>
void AnyPanel(int64_t rows, const char* const* blocks, const uint32_t* x, int64_t tile_rows, Ahead ahead,
              float* const* sums) {
  if constexpr (R > 1) {
    if (rows < R) {
      return AnyPanel<P, B, R - 1>(rows, blocks, x, tile_rows, ahead, sums);
    }
  }
  Multiply<P, R, B>(blocks, x, tile_rows, ahead, sums);
}

template <class V>
struct VectorLinear {
  // Whether many rows are multiplied by two blocks at once. A word of x is then loaded once for two products: with one
  // block each product has a word of its own to load, and a processor that loads no more often than it multiplies
  // waits.
  static bool Paired(const LinearJob& job) {
    return job.int8 ? TwoBlocks<typename V::Int8>(job.m) : TwoBlocks<typename V::Bf16>(job.m);
  }

  static int64_t PerUnit(const LinearJob& job) {
    const int64_t blocks = kUnitBytes / (job.BlockBytes() * (job.gated() ? 2 : 1));
    const int64_t least = !job.gated() && Paired(job) ? 2 : 1;
    return job.m > 64 || blocks < least ? least : blocks;
  }

  // Rows are divided evenly, so that all units of a call are alike.
  static int64_t RowsAtOnce(const LinearJob& job) {
    const int64_t parts = CeilDiv(job.m, kRowsAtOnce);
    return RoundUp(CeilDiv(job.m, parts), kRowBlock);
  }

  static int64_t NumUnits(const LinearJob& job) {
    return CountUnits(job, PerUnit(job)) * CeilDiv(job.m, RowsAtOnce(job));
  }

  // sums [last - first][16] of each of B blocks += the products of these rows with it.
  template <class P, int B>
  static void MultiplyBlocks(const LinearJob& job, const char* const* tiles, int64_t first, int64_t last,
                             float* const* sums) {
    const uint32_t* x = static_cast<const uint32_t*>(job.x);
    const int64_t tile_rows = job.BlockBytes() / 64, most = PanelMost<P>(job.m);
    if (job.m <= most) {
      AnyPanel<P, B>(job.m, tiles, x, tile_rows, {kPrefetchBytes, 0}, sums);
      return;
    }
    const int64_t part = CeilDiv(64, CeilDiv(last - first, most));  // of each tile row's bytes a panel fetches
    for (int64_t begin = 0; begin < tile_rows; begin += kStretch) {
      const int64_t count = Min(tile_rows - begin, kStretch);
      const uint32_t* panel = x + (begin * job.m + first * count) * P::kSteps;
      Ahead ahead{count * 64, part - 64};
      for (int64_t row = first; row < last;) {
        const int64_t rows = PanelRows(most, job.m, row);
        const char* stretches[B];
        float* to[B];
        for (int b = 0; b < B; ++b) {
          stretches[b] = tiles[b] + begin * 64;
          to[b] = sums[b] + (row - first) * kBlockOut;
        }
        AnyPanel<P, B>(rows, stretches, panel, count, ahead, to);
        ahead.bytes += part * count;
        panel += rows * count * P::kSteps;
        row += rows;
      }
    }
  }

  template <class P>
  static void Run(const LinearJob& job, const UnitBlocks& unit_blocks, int64_t first, int64_t last) {
    alignas(64) float memory[2][kRowsAtOnce * kBlockOut];
    float* sums[2] = {memory[0], memory[1]};
    const int64_t rows = last - first, end = unit_blocks.block + unit_blocks.count;
    const bool together = job.m <= kFewRows || Paired(job);
    for (int64_t b = unit_blocks.block; b < end;) {
      // Two blocks make one output, or are multiplied together.
      const int64_t count = job.gated() || (together && b + 1 < end) ? 2 : 1;
      int64_t weight[2], block[2];
      const char* tiles[2];
      for (int64_t i = 0; i < count; ++i) {
        weight[i] = job.gated() ? i : unit_blocks.weight;
        block[i] = job.gated() ? b : b + i;
        tiles[i] = job.weights[weight[i]].tiles + block[i] * job.BlockBytes();
        memset(sums[i], 0, rows * kBlockOut * 4);
      }
      if (together && count == 2) {
        MultiplyBlocks<P, 2>(job, tiles, first, last, sums);
      } else {
        for (int64_t i = 0; i < count; ++i) {
          MultiplyBlocks<P, 1>(job, tiles + i, first, last, sums + i);
        }
      }
      for (int64_t i = 0; job.int8 && i < count; ++i) {
        Dequantize(job, weight[i], block[i], first, rows, sums[i], P::kForm == Form::kFourOffset);
      }
      if (job.gated()) {
        FinishGate(job, b, first, rows, sums[0], sums[1]);
      } else {
        Finish(job, unit_blocks.weight, b, first, rows, sums[0], count == 2 ? sums[1] : nullptr);
      }
      b += job.gated() ? 1 : count;
    }
  }

  static void RunUnit(const LinearJob& job, int64_t unit) {
    const int64_t units = CountUnits(job, PerUnit(job)), rows = RowsAtOnce(job);
    const UnitBlocks unit_blocks = FindUnit(job, unit % units, PerUnit(job));
    const int64_t first = unit / units * rows;
    const int64_t last = Min(first + rows, job.m);
    job.int8 ? Run<typename V::Int8>(job, unit_blocks, first, last)
             : Run<typename V::Bf16>(job, unit_blocks, first, last);
  }

  static int64_t XBytes(int64_t m, int64_t k, bool int8) {
    return m * 4 * (int8 ? Words(V::Int8::kForm, k) : Words(V::Bf16::kForm, k));
  }

  static void PutRows(const LinearInput& input, int64_t block, const LinearJob& job, void* x, float* x_scale,
                      float* row) {
    job.int8 ? PutPanels<typename V::Int8>(input, block, job, kStretch, static_cast<uint32_t*>(x), x_scale, row)
             : PutPanels<typename V::Bf16>(input, block, job, kStretch, static_cast<uint32_t*>(x), x_scale, row);
  }

  static const LinearKernel& Kernel() {
    static const LinearKernel kernel{NumUnits, RunUnit, XBytes, PutRows};
    return kernel;
  }
};

}  // namespace
}  // namespace penstock
