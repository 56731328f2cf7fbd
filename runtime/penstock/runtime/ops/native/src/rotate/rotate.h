// The operations between the qkv product and attention: RMS norm of queries and keys by head, and rotary embedding.
#pragma once

#include <cstdint>

namespace penstock {

struct RotateJob {
  const uint16_t* qkv;  // bf16 [rows, (heads + 2 * kv_heads) * dim]
  const float* cos;     // [rows, dim / 2]
  const float* sin;
  const uint16_t* q_norm;  // bf16 [dim] or null
  const uint16_t* k_norm;
  float eps;
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
