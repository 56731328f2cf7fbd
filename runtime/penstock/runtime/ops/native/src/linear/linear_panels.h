// Puts x into the form that linear_vector.h multiplies: panels of rows, words [step][row].
#pragma once

#include "common/scratch.h"
#include "common/transpose.h"
#include "linear/linear_common.h"

namespace penstock {
namespace {

// What a word of x holds: a float32, two bf16, or four int8, either as they are or plus 128 as unsigned bytes.
enum class Form { kFloat, kPair, kFour, kFourOffset };

constexpr int64_t Words(Form form, int64_t k) { return form == Form::kFloat ? k : form == Form::kPair ? k / 2 : k / 4; }

// The number of rows of the panel that begins at `row`. A row block is divided into panels of at most `most` rows, as
// evenly as possible; no panel reaches into the next block.
inline int64_t PanelRows(int64_t most, int64_t m, int64_t row) {
  const int64_t first = row / kRowBlock * kRowBlock;
  const int64_t count = Min(m - first, kRowBlock);
  const int64_t num_panels = CeilDiv(count, most);
  const int64_t rows_per_panel = CeilDiv(count, num_panels);
  return Min(first + count - row, rows_per_panel);
}

// Converts a row of float32 to words. Even as kFloat it is rounded to bf16, so that every machine computes the same
// model.
inline void PutRow(Form form, const float* row, int64_t k, float* scale, uint32_t* words) {
  if (form == Form::kFloat || form == Form::kPair) {
    uint16_t rounded[16];
    for (int64_t i = 0; i < k; i += 16) {
      StoreBf16(rounded, Load(row + i));
      if (form == Form::kFloat) {
        Store(reinterpret_cast<float*>(words) + i, LoadBf16(rounded));
      } else {
        memcpy(words + i / 2, rounded, sizeof rounded);
      }
    }
    return;
  }
  const float peak = RowPeak(row, k);
  *scale = peak / 127.0f;
  Quantize(row, k, Int8Inverse(peak), reinterpret_cast<int8_t*>(words));
  if (form != Form::kFourOffset) {
    return;
  }
  for (int64_t w = 0; w < k / 4; ++w) {
    words[w] ^= 0x80808080u;
  }
}

// Puts the rows of a row block into their place in x. `row` is room for k floats.
inline void PutPanels(Form form, int64_t most, const LinearInput& input, int64_t block, const LinearJob& job,
                      uint32_t* x, float* x_scale, float* row) {
  const int64_t words = Words(form, job.k), first = block * kRowBlock;
  const int64_t last = Min(job.m, first + kRowBlock);
  const int64_t stride = words + 16;  // rows a power of two apart would share a set of the first-level cache
  auto* apart = reinterpret_cast<uint32_t*>(Scratch<struct LinearPanel>(kRowBlock * stride * 4));
  for (int64_t from = first; from < last;) {
    const int64_t rows = PanelRows(most, job.m, from);
    uint32_t* panel = x + from * words;
    for (int64_t r = 0; r < rows; ++r) {
      LoadRow(input, from + r, job.k, row);
      PutRow(form, row, job.k, job.int8 ? x_scale + from + r : nullptr, rows == 1 ? panel : apart + r * stride);
    }
    if (rows > 1) {
      TransposeWords(apart, stride, rows, words, panel);
    }
    from += rows;
  }
}

}  // namespace
}  // namespace penstock
