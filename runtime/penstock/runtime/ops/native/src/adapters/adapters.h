// What LoRA adapters add to the products of a linear layer: y = (x A) B for each row, with matrices of the row's
// adapter.
#pragma once

#include <cstdint>

namespace penstock {

// Rows with the same matrices that share what is read of them. Their sums fill the registers.
constexpr int64_t kRowsTogether = 8;

// From one row of x as float32 to the next. Without the line between them, rows of a power of two inputs would have
// their values in the same few places of the first-level cache.
constexpr int64_t WideStride(int64_t k) { return k + 16; }

// A row that has an adapter.
struct AdaptedRow {
  const uint16_t* x;         // bf16 [k]
  float* y;                  // float32 [outputs of all parts]
  const uint16_t* matrices;  // of the layer
  float factor;              // by which x is multiplied, and rounded to bf16, before the products
};

// Some rows with the same matrices.
struct AdaptedRows {
  const AdaptedRow* rows;
  int64_t count;  // 1 to kRowsTogether
  float* small;   // float32 [count, num_parts * rank]: x A
  int64_t of_row;
};

// All sums have one order, whatever `count` is: small has two sums, of the inputs with even and with odd numbers, which
// are added last; y is a sum over the rank.
struct AdapterKernel {
  // small of the parts [first, last). `wide` has room for kRowsTogether * WideStride(k) floats.
  void (*down)(const AdaptedRows&, int64_t k, int64_t rank, int64_t first, int64_t last, float* wide);
  // The outputs [first, last) of a part with `outputs` outputs, which lie in y from `column` on. first and last are
  // multiples of 16. `b` is the part's matrix B.
  void (*up)(const AdaptedRows&, int64_t rank, int64_t part, const uint16_t* b, int64_t outputs, int64_t column,
             int64_t first, int64_t last);
};

const AdapterKernel& AdaptersAvx2();
const AdapterKernel& AdaptersAvx512();

}  // namespace penstock
