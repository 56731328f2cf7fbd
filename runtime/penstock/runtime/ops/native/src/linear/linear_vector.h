// Linear layers on vector registers, for any instruction set described by a traits class V whose members Bf16, Int8,
// Codes<bits, least>, Nested<bits> and Table say how words (32 bits) of weights and of x are multiplied:
//   Sum             a register of float32 or int32 sums; kWidth of them
//   kParts          registers for the 16 outputs of a tile's row
//   kSteps          products to a tile's row: each takes one word of every row of x
//   kRows           rows of x at once, what the registers hold
//   kPairedRows     rows of x at once with two blocks, for more than kRows rows; 0: never two blocks for those
//   kForm           what x's words are, see Form
//   LoadSum(const float*), StoreSum(float*, sum), Weights<step>(tile row, part), Word(const uint32_t*),
//   Add(sum, weights, word)
//   kByGroup        whether groups of inputs have scales
//
// Where kByGroup is true:
//   kGroups         groups of a tile (of 64 inputs) that have scales of their own: 2 or 4
//   kScaleLines     lines of a tile before its codes: 0, or 1 with scales, or more also with zeros or minima
//   kGroupLines     lines of codes in a group, of which kCodeLines are multiplied; the others have bits of their codes
//   kMiddle         the code that stands for 0; or 0, if weights have zeros or minima of their own
//   kLeast          what a weight has beside scales: nothing, or zeros, or minima
//   Weights<step>(group, line, part) in place of Weights<step>(tile row, part)
//   Floats          a register of kWidth float32, with Load, Store, Fill(word), Times(a, b), and PlusProduct(a, b, c)
//                   and MinusProduct(a, b, c): a +- b * c, rounded once
//   Scale(tile, group, part), Least(tile, group, part)  those of a group
//   Begin(word)     sums before the first product, where the word is what belongs to a row and a group
//   Total(sum, word)  the whole numbers that the sums of a group stand for
//
// The inputs are cut in stretches, and the rows of x in panels of at most kRows rows. A block's weights of one stretch
// are multiplied by all panels in turn, so that they come from the first-level cache from the second panel on; the sums
// of a panel wait in memory for its next stretch. Small floats become bf16 stretch by stretch. Meanwhile the next
// stretch is fetched, a part of it during each panel, so that reading memory and multiplying go on at the same time.
// Where panels have kPairedRows rows, two blocks are multiplied together.
//
// x holds stretch by stretch, in each panel by panel, and in a panel words [step][row of the panel]: the words that a
// step multiplies by the same weights lie side by side, and a stretch is read in one ascending sweep. (Rows that lie
// apart by a power of two bytes would share a few sets of the first-level cache.)
//
// An output is one chain of products in ascending order of inputs, whatever the number of rows: its bits depend on
// its own row alone. (A sum in memory is the same float32 as in a register.) By group, a link of the chain is a sum of
// whole numbers, which is exact, times the scales of x and of the weight.
#pragma once

#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "linear/linear_common.h"
#include "linear/linear_expand.h"
#include "linear/linear_panels.h"

namespace penstock {
namespace {

constexpr int64_t kUnitBytes = 128 * 1024;  // of weight in a unit: enough to be worth a claim
constexpr int64_t kPrefetchBytes = 4096;    // how far ahead a weight is prefetched if there is one panel
constexpr int64_t kStretch = 128;           // lines: 8 KiB of weights, a quarter of a small first-level cache
constexpr int64_t kRowsAtOnce = 256;        // of x: a stretch of them stays in the second-level cache
constexpr int64_t kInputsOfLine = 2;        // of bf16
constexpr int64_t kFewRows = 2;  // so few have too few sums to fill the latency of an addition with one block

// The lines and the words of each row of x in a unit of weights, which is a tile by group and else a line; and how many
// of these a stretch has.
template <class P>
constexpr int64_t LinesOfUnit(bool with_scales) {
  if constexpr (P::kByGroup) {
    return P::kGroups * (with_scales ? P::kGroupLines : P::kCodeLines) + (with_scales ? P::kScaleLines : 0);
  }
  return 1;
}
template <class P>
constexpr int64_t kUnitLines = LinesOfUnit<P>(true);
template <class P>
constexpr int64_t kUnitWords = LinesOfUnit<P>(false) * P::kSteps;
template <class P>
constexpr int64_t kStretchUnits = kStretch / kUnitLines<P>;

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

// Adds the products of one word of each row of x to the sums of a group, which begins at byte `at` of a tile.
template <class P, int kStep, int B, int R>
inline __attribute__((always_inline)) void AddLine(const char* const (&tiles)[B], int64_t at, int line,
                                                   const uint32_t* x, typename P::Sum (&sum)[B][R][P::kParts]) {
  for (int b = 0; b < B; ++b) {
    typename P::Operand weights[P::kParts];
    for (int p = 0; p < P::kParts; ++p) {
      weights[p] = P::template Weights<kStep>(tiles[b] + at, line, p);
    }
    for (int r = 0; r < R; ++r) {
      const typename P::Operand word = P::Word(x + r);
      for (int p = 0; p < P::kParts; ++p) {
        sum[b][r][p] = P::Add(sum[b][r][p], weights[p], word);
      }
    }
  }
}

// Multiply for weights with scales by group: `units` are tiles of 64 inputs, and `scales` are those of the panel's
// rows, see ScaleWords. The sums of a group are in registers, those of all groups in memory.
template <class P, int R, int B>
__attribute__((noinline)) void MultiplyGroups(const char* const* blocks, const uint32_t* x, const uint32_t* scales,
                                              int64_t units, Ahead ahead, float* const* sums) {
  const char* tiles[B];
  for (int b = 0; b < B; ++b) {
    tiles[b] = blocks[b];
  }
  for (int64_t u = 0; u < units; ++u) {
    for (int line = 0; line < kUnitLines<P>; ++line, ahead.bytes += ahead.step) {
      for (int b = 0; b < B; ++b) {
        _mm_prefetch(tiles[b] + line * kLine + ahead.bytes, _MM_HINT_T0);
      }
    }
    for (int g = 0; g < P::kGroups; ++g, scales += 2 * R) {
      typename P::Sum sum[B][R][P::kParts];
      for (int b = 0; b < B; ++b) {
        for (int r = 0; r < R; ++r) {
          for (int p = 0; p < P::kParts; ++p) {
            sum[b][r][p] = P::Begin(scales + R + r);
          }
        }
      }
#pragma GCC unroll 8  // otherwise GCC stores all sums after each line
      for (int line = 0; line < P::kCodeLines; ++line) {
        AddLine<P, 0>(tiles, (P::kScaleLines + g * P::kGroupLines) * kLine, line, x, sum);
        x += R;
        if constexpr (P::kSteps == 2) {
          AddLine<P, 1>(tiles, (P::kScaleLines + g * P::kGroupLines) * kLine, line, x, sum);
          x += R;
        }
      }
      for (int b = 0; b < B; ++b) {
        for (int p = 0; p < P::kParts; ++p) {
          typename P::Floats scale{}, least{};
          if constexpr (P::kScaleLines > 0) {
            scale = P::Scale(tiles[b], g, p);
          }
          if constexpr (P::kLeast != LeastOf::kNothing) {
            least = P::Least(tiles[b], g, p);
          }
          for (int r = 0; r < R; ++r) {
            float* to = sums[b] + r * kBlockOut + p * P::kWidth;
            typename P::Floats value = P::Total(sum[b][r][p], scales + R + r);
            if constexpr (P::kLeast == LeastOf::kZeros) {
              value = P::MinusProduct(value, least, P::Fill(scales + R + r));
            }
            if constexpr (P::kLeast == LeastOf::kMinima) {
              value = P::MinusProduct(P::Times(value, scale), least, P::Fill(scales + R + r));
              value = P::PlusProduct(P::Load(to), value, P::Fill(scales + r));
            } else if constexpr (P::kScaleLines > 0) {
              value = P::PlusProduct(P::Load(to), P::Times(value, P::Fill(scales + r)), scale);
            } else {
              value = P::PlusProduct(P::Load(to), value, P::Fill(scales + r));
            }
            P::Store(to, value);
          }
        }
      }
    }
    for (int b = 0; b < B; ++b) {
      tiles[b] += kUnitLines<P> * kLine;
    }
  }
}

// Multiply or MultiplyGroups for a panel of any size.
template <class P, int B, int R = B == 1 ? P::kRows : Max<int>(P::kPairedRows, kFewRows)>
void AnyPanel(int64_t rows, const char* const* blocks, const uint32_t* x, const uint32_t* scales, int64_t units,
              Ahead ahead, float* const* sums) {
  if constexpr (R > 1) {
    if (rows < R) {
      return AnyPanel<P, B, R - 1>(rows, blocks, x, scales, units, ahead, sums);
    }
  }
  if constexpr (P::kByGroup) {
    MultiplyGroups<P, R, B>(blocks, x, scales, units, ahead, sums);
  } else {
    Multiply<P, R, B>(blocks, x, units, ahead, sums);
  }
}

template <class P>
struct Multiplier {
  using Type = P;
};

template <class V>
struct VectorLinear {
  // Calls run(Multiplier<P>()) with the P of the format.
  template <typename Run>
  static auto Choose(Format format, Run&& run) {
    switch (format) {
      case Format::kBf16:
      case Format::kE2m1:
      case Format::kE4m3Groups:
      case Format::kE4m3:
        return run(Multiplier<typename V::Bf16>());
      case Format::kInt8:
        return run(Multiplier<typename V::Int8>());
      case Format::kCodes4:
        return run(Multiplier<typename V::template Codes<4, LeastOf::kNothing>>());
      case Format::kCodes4Zeros:
        return run(Multiplier<typename V::template Codes<4, LeastOf::kZeros>>());
      case Format::kCodes8:
        return run(Multiplier<typename V::template Codes<8, LeastOf::kNothing>>());
      case Format::kCodes8Zeros:
        return run(Multiplier<typename V::template Codes<8, LeastOf::kZeros>>());
      case Format::kCodes4Minima:
        return run(Multiplier<typename V::template Codes<4, LeastOf::kMinima>>());
      case Format::kCodes8Minima:
        return run(Multiplier<typename V::template Codes<8, LeastOf::kMinima>>());
      case Format::kNested4:
        return run(Multiplier<typename V::template Nested<4>>());
      case Format::kNested6:
        return run(Multiplier<typename V::template Nested<6>>());
      case Format::kTable4:
        return run(Multiplier<typename V::Table>());
    }
    __builtin_unreachable();
  }

  // Whether many rows are multiplied by two blocks at once. A word of x is then loaded once for two products: with one
  // block each product has a word of its own to load, and a processor that loads no more often than it multiplies
  // waits.
  static bool Paired(const LinearJob& job) {
    return Choose(job.format, [&](auto p) { return TwoBlocks<typename decltype(p)::Type>(job.m); });
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
    const uint32_t* scales = x + Words(P::kForm, job.k) * job.m;
    const int64_t units = Words(P::kForm, job.k) / kUnitWords<P>, most = PanelMost<P>(job.m);
    const bool expanded = !P::kByGroup && IsSmallFloats(job.format);
    if (job.m <= most && !expanded) {
      AnyPanel<P, B>(job.m, tiles, x, scales, units, {kPrefetchBytes, 0}, sums);
      return;
    }
    const int64_t part = CeilDiv(kLine, CeilDiv(last - first, most));  // of each line's bytes a panel fetches
    alignas(64) char in_cache[B][kStretch * kLine];
    for (int64_t begin = 0; begin < units; begin += kStretchUnits<P>) {
      const int64_t count = Min(units - begin, kStretchUnits<P>), lines = count * kUnitLines<P>;
      const uint32_t* panel = x + (begin * job.m + first * count) * kUnitWords<P>;
      Ahead ahead{lines * kLine, part - kLine};
      const char* stretches[B];
      for (int b = 0; b < B; ++b) {
        stretches[b] = tiles[b] + begin * kUnitLines<P> * kLine;
        if (expanded) {
          Expand(job.format, tiles[b], job.k, begin * kInputsOfLine, (begin + count) * kInputsOfLine, in_cache[b]);
          stretches[b] = in_cache[b];
          ahead = {0, 0};  // Expand fetches
        }
      }
      for (int64_t row = first; row < last;) {
        const int64_t rows = PanelRows(most, job.m, row);
        float* to[B];
        for (int b = 0; b < B; ++b) {
          to[b] = sums[b] + (row - first) * kBlockOut;
        }
        const uint32_t* of_panel = scales + row * ScaleWords<P>(job.k) + begin * rows * ScaleWords<P>(2 * kGroup);
        AnyPanel<P, B>(rows, stretches, panel, of_panel, count, ahead, to);
        ahead.bytes += expanded ? 0 : part * lines;
        panel += rows * count * kUnitWords<P>;
        row += rows;
      }
    }
  }

  template <class P>
  static void Run(const LinearJob& job, const UnitBlocks& unit_blocks, int64_t first, int64_t last) {
    alignas(64) float memory[2][kRowsAtOnce * kBlockOut];
    float* sums[2] = {memory[0], memory[1]};
    const int64_t rows = last - first, end = unit_blocks.block + unit_blocks.count;
    // By group there are enough sums without a second block.
    const bool together = (!P::kByGroup && job.m <= kFewRows) || Paired(job);
    for (int64_t b = unit_blocks.block; b < end;) {
      // Two blocks make one output, or are multiplied together.
      const int64_t count = job.gated() || (together && b + 1 < end) ? 2 : 1;
      FetchForBlocks(job, unit_blocks.weight, b, count, first, last);
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
      for (int64_t i = 0; i < count; ++i) {
        if (job.format == Format::kInt8) {
          MultiplyByFactors(job.weights[weight[i]].scale + block[i] * kBlockOut, rows, sums[i]);
        } else if (HasFactors(job.format)) {
          const char* factors = tiles[i] + BytesOfTiles(job.format, job.k);
          MultiplyByFactors(reinterpret_cast<const float*>(factors), rows, sums[i]);
        }
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
    Choose(job.format, [&](auto p) { Run<typename decltype(p)::Type>(job, unit_blocks, first, last); });
  }

  static int64_t XBytes(int64_t m, int64_t k, Format format) {
    return Choose(format, [&](auto p) {
      using P = typename decltype(p)::Type;
      return m * 4 * (Words(P::kForm, k) + ScaleWords<P>(k));
    });
  }

  static void PutRows(const LinearInput& input, int64_t block, const LinearJob& job, void* x, float*, float* row) {
    Choose(job.format, [&](auto p) {
      using P = typename decltype(p)::Type;
      PutPanels<P>(input, block, job, kStretchUnits<P> * kUnitWords<P>, static_cast<uint32_t*>(x), row);
    });
  }

  static const LinearKernel& Kernel() {
    static const LinearKernel kernel{NumUnits, RunUnit, XBytes, PutRows};
    return kernel;
  }
};

}  // namespace
}  // namespace penstock
