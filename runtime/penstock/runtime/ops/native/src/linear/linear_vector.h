// Linear layers on vector registers, for any instruction set described by a traits class V whose members Bf16 and
// Int8 say how words (32 bits) of weights and of x are multiplied:
//   Sum             a register of float32 or int32 sums
//   kParts          registers for the 16 outputs of a tile's row
//   kSteps          products to a tile's row: each takes one word of every row of x
//   kRows           rows of x at once, what the registers hold
//   kForm           what x's words are: kFloat one value, kPair two in bf16, kFour, kFourOffset (plus 128) in int8
//   Zero(), Finish(float*, sum), Weights<step>(tile row, part), Word(const uint32_t*), Add(sum, weights, word)
//
// x is cut in panels of at most kRows rows, words [step over all inputs][row of the panel]: the words that a step
// multiplies by the same weights lie side by side, and a panel is read in one ascending sweep. (Rows that lie apart
// by a power of two bytes would share a few sets of the first-level cache.)
//
// An output is one chain of products in ascending order of inputs, whatever the number of rows: its bits depend on
// its own row alone.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "linear/linear_common.h"
#include "linear/linear_panels.h"

namespace penstock {
namespace {

constexpr int64_t kUnitBytes = 128 * 1024;   // of weight in a unit: enough to be worth a claim
constexpr int64_t kPrefetchBytes = 4096;     // how far ahead a weight is prefetched
constexpr int64_t kRowsBytes = 1024 * 1024;  // of x, which stay in the second-level cache beside some weights
constexpr int64_t kFewestRows = 64;          // of x at once in any case: with fewer, weights come too slowly

// Multiplies one block's tile rows by a panel of R rows, over all inputs. It is not inlined, so that its sums stay in
// registers whatever its caller keeps there.
template <class P, int R>
__attribute__((noinline)) void Block(const char* tiles, const uint32_t* x, int64_t tile_rows, float* sums) {
  typename P::Sum sum[R][P::kParts];
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P::kParts; ++p) {
      sum[r][p] = P::Zero();
    }
  }
  for (int64_t g = 0; g < tile_rows; ++g, tiles += 64) {
    _mm_prefetch(tiles + kPrefetchBytes, _MM_HINT_T0);
    const auto step = [&](auto number) {
      typename P::Operand weights[P::kParts];
      for (int p = 0; p < P::kParts; ++p) {
        weights[p] = P::template Weights<decltype(number)::value>(tiles, p);
      }
      for (int r = 0; r < R; ++r) {
        const typename P::Operand word = P::Word(x + r);
        for (int p = 0; p < P::kParts; ++p) {
          sum[r][p] = P::Add(sum[r][p], weights[p], word);
        }
      }
      x += R;
    };
    step(std::integral_constant<int, 0>());
    if constexpr (P::kSteps == 2) {
      step(std::integral_constant<int, 1>());
    }
  }
  for (int r = 0; r < R; ++r) {
    P::Finish(sums + r * kBlockOut, sum[r]);
  }
}

template <class P, int R = P::kRows>
void AnyBlock(int64_t rows, const char* tiles, const uint32_t* x, int64_t tile_rows, float* sums) {
  if constexpr (R > 1) {
    if (rows < R) {
      return AnyBlock<P, R - 1>(rows, tiles, x, tile_rows, sums);
    }
  }
  Block<P, R>(tiles, x, tile_rows, sums);
}

template <class V>
struct VectorLinear {
  static int64_t WordsOf(const LinearJob& job) {
    return job.int8 ? Words(V::Int8::kForm, job.k) : Words(V::Bf16::kForm, job.k);
  }

  static int64_t PerUnit(const LinearJob& job) {
    const int64_t blocks = kUnitBytes / (job.BlockBytes() * (job.gated() ? 2 : 1));
    return job.m > 64 || blocks < 1 ? 1 : blocks;
  }

  // Rows are divided evenly, so that all units of a call are alike.
  static int64_t RowsAtOnce(const LinearJob& job) {
    const int64_t most = Max(kRowsBytes / (WordsOf(job) * 4), kFewestRows);
    const int64_t parts = CeilDiv(job.m, most);
    return RoundUp(CeilDiv(job.m, parts), kRowBlock);
  }

  static int64_t NumUnits(const LinearJob& job) {
    return CountUnits(job, PerUnit(job)) * CeilDiv(job.m, RowsAtOnce(job));
  }

  template <class P>
  static void Run(const LinearJob& job, const UnitBlocks& unit_blocks, int64_t first, int64_t last) {
    const int64_t words = Words(P::kForm, job.k), tile_rows = job.BlockBytes() / 64;
    const uint32_t* x = static_cast<const uint32_t*>(job.x);
    alignas(64) float sums[2][P::kRows * kBlockOut];
    for (int64_t b = unit_blocks.block; b < unit_blocks.block + unit_blocks.count; ++b) {
      for (int64_t row = first; row < last;) {
        const int64_t rows = PanelRows(P::kRows, job.m, row);
        for (int64_t part = 0; part < (job.gated() ? 2 : 1); ++part) {
          const int64_t weight = job.gated() ? part : unit_blocks.weight;
          const char* tiles = job.weights[weight].tiles + b * job.BlockBytes();
          AnyBlock<P>(rows, tiles, x + row * words, tile_rows, sums[part]);
          if (job.int8) {
            Dequantize(job, weight, b, row, rows, sums[part], P::kForm == Form::kFourOffset);
          }
        }
        if (job.gated()) {
          FinishGate(job, b, row, rows, sums[0], sums[1]);
        } else {
          Finish(job, unit_blocks.weight, b, row, rows, sums[0], nullptr);
        }
        row += rows;
      }
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
    job.int8 ? PutPanels(V::Int8::kForm, V::Int8::kRows, input, block, job, static_cast<uint32_t*>(x), x_scale, row)
             : PutPanels(V::Bf16::kForm, V::Bf16::kRows, input, block, job, static_cast<uint32_t*>(x), x_scale, row);
  }

  static const LinearKernel& Kernel() {
    static const LinearKernel kernel{NumUnits, RunUnit, XBytes, PutRows};
    return kernel;
  }
};

}  // namespace
}  // namespace penstock
