// Puts x into the form that linear_vector.h multiplies: stretches of panels of rows, words [step][row].
#pragma once

#include "common/scratch.h"
#include "common/transpose.h"
#include "linear/linear_common.h"

namespace penstock {
namespace {

// What a word of x holds: a float32; two bf16; two of four int8 as int16, where a word with the values 0 and 2 precedes
// the one with 1 and 3; or four int8.
enum class Form { kFloat, kPair, kHalves, kFour };

// What is taken from the products of a group: nothing; or the sum of the row's group times the zero of the weight's,
// before the scale; or that sum times a minimum, behind the scale.
enum class LeastOf { kNothing, kZeros, kMinima };

// What codes that are places in a table stand for, as ops/codes.py says.
alignas(16) constexpr int8_t kTable[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

constexpr int64_t Words(Form form, int64_t k) { return form == Form::kFloat ? k : form == Form::kFour ? k / 4 : k / 2; }

// The words of a panel that follow those of all rows, where rows are quantised by group: for each group of the weight
// the scales of all rows, and then what is added to their sums.
template <class P>
constexpr int64_t ScaleWords(int64_t k) {
  if constexpr (P::kByGroup) {
    return k * P::kGroups / (2 * kGroup) * 2;
  }
  return 0;
}

// Whether m rows are multiplied by two blocks at once.
template <class P>
constexpr bool TwoBlocks(int64_t m) {
  return m > P::kRows && P::kPairedRows > 0;
}

// How many of m rows a panel has at most.
template <class P>
constexpr int64_t PanelMost(int64_t m) {
  return TwoBlocks<P>(m) ? P::kPairedRows : P::kRows;
}

// The number of rows of the panel that begins at `row`. A row block is divided into panels of at most `most` rows, as
// evenly as possible; no panel reaches into the next block.
inline int64_t PanelRows(int64_t most, int64_t m, int64_t row) {
  const int64_t at = row % kRowBlock;
  const auto count = static_cast<uint32_t>(Min(m - (row - at), kRowBlock));  // divided for each panel of each stretch
  const auto num_panels = static_cast<uint32_t>(CeilDiv(count, most));
  const uint32_t least = count / num_panels, larger = count - least * num_panels;
  return at < larger * (least + 1) ? least + 1 : least;  // the first `larger` panels have one row more
}

// Eight fours of int8 become kHalves' words: of each four, first the values 0 and 2, then 1 and 3.
inline void WidenFours(const int8_t* fours, uint32_t* words) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(fours));
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), odd = _mm256_srai_epi16(bytes, 8);
  const __m256i low = _mm256_unpacklo_epi32(even, odd), high = _mm256_unpackhi_epi32(even, odd);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), _mm256_permute2x128_si256(low, high, 0x20));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(words) + 1, _mm256_permute2x128_si256(low, high, 0x31));
}

// Puts 16 values into words of the forms for bf16 weights. Even as kFloat they are rounded to bf16, so that every
// machine computes the same model.
inline void PutBf16(Form form, Lanes values, uint32_t* words) {
  if (form == Form::kFloat) {
    Store(reinterpret_cast<float*>(words), RoundToBf16(values));
  } else {
    StoreBf16(reinterpret_cast<uint16_t*>(words), values);
  }
}

// Converts a row of x to words of the forms for bf16 weights.
inline void PutRow(Form form, const LinearInput& input, int64_t row, int64_t k, uint32_t* words) {
  const int64_t per_word = form == Form::kFloat ? 1 : 2;
  if (input.norm || input.factors) {
    EachOfRow(input, row, k, [&](int64_t i, Lanes values) { PutBf16(form, values, words + i / per_word); });
  } else if (form == Form::kFloat) {
    const uint16_t* x = input.RowAt(row);
    for (int64_t i = 0; i < k; i += 16) {
      Store(reinterpret_cast<float*>(words) + i, LoadBf16(x + i));
    }
  } else {
    memcpy(words, input.RowAt(row), k * sizeof(uint16_t));
  }
}

inline int32_t SumOf16(const int8_t* bytes) {
  const __m128i from_128 =
      _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)), _mm_set1_epi8(static_cast<char>(0x80)));
  const __m128i sums = _mm_sad_epu8(from_128, _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
}

// Quantises a row by groups of 32 to words of kFour or kHalves. `scales` gets two words for each group of a weight, of
// which a tile has `groups`, `stride` words apart: the scale; and what is added to a sum of products with weights, of
// which `middle` stands for 0. Where `middle` is 0, it is the sum of the row's group as float32, for weights with zeros
// or minima of their own.
inline void PutGroups(Form form, const float* floats, int64_t k, int32_t middle, int groups, uint32_t* words,
                      uint32_t* scales, int64_t stride) {
  for (int64_t i = 0; i < k; i += kGroup) {
    alignas(32) int8_t bytes[kGroup];
    const float peak = RowPeak(floats + i, kGroup), scale = peak / 127.0f;
    Quantize(floats + i, kGroup, Int8Inverse(peak), bytes);
    const int32_t halves[2] = {SumOf16(bytes), SumOf16(bytes + 16)};
    for (int part = 0; part < groups / 2; ++part, scales += 2 * stride) {
      const int32_t sum = groups == 2 ? halves[0] + halves[1] : halves[part];
      const float as_float = static_cast<float>(sum);
      const int32_t added = -middle * sum;
      memcpy(scales, &scale, 4);
      memcpy(scales + stride, middle ? static_cast<const void*>(&added) : &as_float, 4);
    }
    if (form == Form::kHalves) {
      WidenFours(bytes, words + i / 2);
    } else {
      memcpy(words + i / 4, bytes, kGroup);
    }
  }
}

// Puts the rows of a row block into their place in x, whose form and panels are those of P (see linear_vector.h), and
// whose stretches have `steps` steps. `row` is room for k floats.
template <class P>
void PutPanels(const LinearInput& input, int64_t block, const LinearJob& job, int64_t steps, uint32_t* x, float* row) {
  static_assert(P::kRows <= kTransposedRows, "TransposeWords takes a whole panel");
  const int64_t words = Words(P::kForm, job.k), first = block * kRowBlock;
  const int64_t last = Min(job.m, first + kRowBlock), stretch = steps;
  const int64_t stride = words + 16;  // rows a power of two apart would share a set of the first-level cache
  auto* apart = reinterpret_cast<uint32_t*>(Scratch<struct LinearPanel>(kRowBlock * stride * 4));
  for (int64_t from = first; from < last;) {
    const int64_t rows = PanelRows(PanelMost<P>(job.m), job.m, from);
    for (int64_t r = 0; r < rows; ++r) {
      if constexpr (P::kByGroup) {
        LoadRow(input, from + r, job.k, row);
        uint32_t* scales = x + words * job.m + from * ScaleWords<P>(job.k) + r;
        PutGroups(P::kForm, row, job.k, P::kMiddle, P::kGroups, apart + r * stride, scales, rows);
      } else {
        PutRow(P::kForm, input, from + r, job.k, apart + r * stride);
      }
    }
    for (int64_t begin = 0; begin < words; begin += stretch) {
      const int64_t count = Min(words - begin, stretch);
      uint32_t* panel = x + begin * job.m + from * count;
      if (rows == 1) {
        memcpy(panel, apart + begin, count * 4);
      } else {
        TransposeWords(apart + begin, stride, rows, count, panel);
      }
    }
    from += rows;
  }
}

}  // namespace
}  // namespace penstock
