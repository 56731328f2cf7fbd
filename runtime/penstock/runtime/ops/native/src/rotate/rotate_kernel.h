// The kernel of rotate.h, compiled once per instruction set.
#pragma once

#include <cmath>

#include "common/lanes.h"
#include "rotate/rotate.h"

namespace penstock {
namespace {

constexpr int64_t kLanes = 16;

// Channel i is rotated together with channel i + dim / 2 (Su et al. 2021, in the order of Hugging Face's checkpoints).
inline void RotateHead(const uint16_t* from, const uint16_t* norm, float eps, const float* cos, const float* sin,
                       int64_t dim, uint16_t* to) {
  const int64_t half = dim / 2;
  Lanes scale = Fill(1.0f);
  if (norm) {
    Lanes squares = Fill(0.0f);
    for (int64_t i = 0; i < dim; i += kLanes) {
      const Lanes x = LoadBf16(from + i);
      squares = Add(squares, Mul(x, x));
    }
    scale = Fill(1.0f / std::sqrt(Total(squares) / static_cast<float>(dim) + eps));
  }
  for (int64_t i = 0; i < half; i += kLanes) {
    Lanes first = Mul(LoadBf16(from + i), scale), second = Mul(LoadBf16(from + half + i), scale);
    if (norm) {
      first = Mul(first, LoadBf16(norm + i));
      second = Mul(second, LoadBf16(norm + half + i));
    }
    const Lanes c = Load(cos + i), s = Load(sin + i);
    StoreBf16(to + i, Sub(Mul(first, c), Mul(second, s)));
    StoreBf16(to + half + i, Add(Mul(second, c), Mul(first, s)));
  }
}

inline void Rows(const RotateJob& job, int64_t first, int64_t last) {
  const int64_t half = job.dim / 2, kv_size = job.kv_heads * job.dim;
  for (int64_t row = first; row < last; ++row) {
    const uint16_t* from = job.qkv + row * (job.heads + 2 * job.kv_heads) * job.dim;
    const float* cos = job.cos + row * half;
    const float* sin = job.sin + row * half;
    for (int64_t h = 0; h < job.heads; ++h, from += job.dim) {
      RotateHead(from, job.q_norm, job.eps, cos, sin, job.dim, job.q + (row * job.heads + h) * job.dim);
    }
    for (int64_t h = 0; h < job.kv_heads; ++h, from += job.dim) {
      RotateHead(from, job.k_norm, job.eps, cos, sin, job.dim, job.k + (row * job.kv_heads + h) * job.dim);
    }
    memcpy(job.v + row * kv_size, from, kv_size * sizeof(uint16_t));
  }
}

}  // namespace
}  // namespace penstock
