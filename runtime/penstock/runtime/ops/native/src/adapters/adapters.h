// What LoRA adapters add to the products of a linear layer: y = (x A) B for each row, with matrices of the row's slot.
#pragma once

#include <cstdint>

namespace penstock {

constexpr int64_t kRowsTogether = 4;  // rows of one slot that share what is read of its matrices

// Some rows of one slot.
struct AdaptedRows {
  const uint16_t* x[kRowsTogether];  // bf16 [k]
  float* small[kRowsTogether];       // float32 [parts, rank]: x A
  float* y[kRowsTogether];           // float32 [outputs]
  const uint16_t* matrices;          // of the slot, see AdapterJob
  int64_t count;                     // 1 to kRowsTogether
};

// One call of the operation. A slot's matrices are bf16: for each part A as [k, rank]; then for each part B as
// [rank, outputs of the part].
struct AdapterJob {
  int64_t k, rank;  // multiples of 16
};

// All sums have one order, whatever `count` is: small has four sums, each of every fourth input, which are added last;
// y is a sum over the rank.
struct AdapterKernel {
  // small of one part.
  void (*down)(const AdapterJob&, const AdaptedRows&, int64_t part);
  // The outputs [first, last) of a part with `outputs` outputs, which lie in y from `column` on. first and last are
  // multiples of 16.
  void (*up)(const AdapterJob&, const AdaptedRows&, int64_t part, const uint16_t* b, int64_t outputs, int64_t column,
             int64_t first, int64_t last);
};

const AdapterKernel& AdaptersAvx2();
const AdapterKernel& AdaptersAvx512();

}  // namespace penstock
