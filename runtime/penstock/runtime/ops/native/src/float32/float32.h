// Linear layers of models in float32, with what stands between the product and the next layer of an encoder.
//
// A packed weight [out, in] is [out / 16][in][16 out]: the 16 weights that one value of x is multiplied by lie side by
// side, and a block of 16 outputs is read in one ascending sweep.
#pragma once

#include <cstdint>

#include "common/activations.h"

namespace penstock {

// The most arrays that the outputs lie in.
constexpr int kMostParts = 3;

// Some of the outputs, in an array of their own.
struct Float32Part {
  float* y;       // [rows, n]
  int64_t begin;  // the first of them
  int64_t n;      // how many, a multiple of 16
};

// y = norm(residual + plain(x W^T + bias)), all in float32. Each output is one chain of products in ascending order of
// inputs, whatever the number of rows, so its bits depend on its own row alone.
struct Float32Job {
  const float* x;         // [rows, k]
  const float* weight;    // packed
  const char* pieces;     // of the weight, which the kernel has divided; or null
  const float* bias;      // [n], or null
  const float* residual;  // [rows, n], or null; with one part only
  Float32Part parts[kMostParts];
  int64_t k, n;  // multiples of 16
  Plain plain;
  bool normed;             // whether a layer norm follows, over the n outputs of a row; with one part only
  const float* norm;       // [n], or null: not multiplied
  const float* norm_bias;  // [n], or null: not added
  float eps, offset;       // offset is added to norm
};

// The kernels of one instruction set.
struct Float32Kernel {
  int64_t blocks_together;  // how many blocks of 16 outputs are multiplied at once
  int64_t rows_together;    // how many rows of x
  // If there is such a form: the bytes of a weight's pieces, and what makes those of some blocks. That is worth while
  // where several units multiply the same blocks; a unit whose job has none makes its own.
  int64_t (*pieces_bytes)(const Float32Job&);
  void (*divide)(const Float32Job&, int64_t block, int64_t blocks, char* pieces);
  // Computes y before the norm, for rows from `row` on and blocks of 16 outputs from `block` on.
  void (*multiply)(const Float32Job&, int64_t row, int64_t rows, int64_t block, int64_t blocks);
  // Replaces rows of y by their norm.
  void (*normalize)(const Float32Job&, int64_t row, int64_t rows);
};

const Float32Kernel& Float32Avx2();
const Float32Kernel& Float32Avx512();
const Float32Kernel& Float32Amx();

}  // namespace penstock
