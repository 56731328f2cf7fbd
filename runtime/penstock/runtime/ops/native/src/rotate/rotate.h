// The operations between the qkv product and attention: RMS norms of queries, keys and values, rotary embedding, and a
// factor for the queries of each token.
#pragma once

#include <cstdint>

namespace penstock {

// How queries and keys are normalised: each head, or all heads of a token together, both before the rotation; or each
// head after the rotation, maybe without weights. The numbers are those of linear.py.
enum class HeadNorms : int { kHead = 0, kAll = 1, kAfter = 2 };

struct RotateJob {
  const uint16_t* qkv;  // bf16 [rows, (heads + 2 * kv_heads) * dim], or + kv_heads if values are keys
  const float* cos;     // [rows, rotary / 2]
  const float* sin;
  int64_t rotary;          // the first `rotary` channels of a head turn, a multiple of 32 that may be 0
  const uint16_t* q_norm;  // bf16 [dim], or [heads * dim] for all heads together; null: no norm,
                           // or after the rotation one without weights
  const uint16_t* k_norm;  // the same with kv_heads
  const float* q_scale;    // [rows], or null
  HeadNorms norms;
  float eps, offset;  // queries and keys are multiplied by offset + norm
  bool v_norm;        // values are normalised by head, without weights
  bool values_are_keys;
  int64_t heads, kv_heads, dim;  // dim is a multiple of 32
  uint16_t* q;                   // [rows, heads, dim]
  uint16_t* k;                   // [rows, kv_heads, dim]
  uint16_t* v;
};

using RotateRows = void (*)(const RotateJob&, int64_t first, int64_t last);

void RotateRowsAvx2(const RotateJob&, int64_t first, int64_t last);
void RotateRowsAvx512(const RotateJob&, int64_t first, int64_t last);
void RotateRowsAvx512Bf16(const RotateJob&, int64_t first, int64_t last);

}  // namespace penstock
