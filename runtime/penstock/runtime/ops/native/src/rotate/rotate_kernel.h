// The kernel of rotate.h, compiled once per instruction set.
#pragma once

#include <cstring>

#include "common/lanes.h"
#include "common/rms.h"
#include "rotate/rotate.h"

namespace penstock {
namespace {

constexpr int64_t kLanes = 16;

// One head before its rotation: its channels times `inverse`, and times offset + norm if there is a norm.
struct Head {
  const uint16_t* x;      // bf16 [dim]
  const uint16_t* norm;   // bf16 [dim] or null
  Lanes inverse, offset;  // the same value in all lanes

  Lanes At(int64_t channel) const {
    const Lanes value = Mul(LoadBf16(x + channel), inverse);
    return norm ? Mul(value, Add(offset, LoadBf16(norm + channel))) : value;
  }
};

// Calls put(channel, values) for all channels of the rotated head, 16 at a time. Channel i is rotated together with
// channel i + rotary / 2 (Su et al. 2021, in the order of Hugging Face's checkpoints); those from `rotary` on are not
// rotated.
template <typename Put>
inline void Turn(const RotateJob& job, const Head& head, int64_t row, Put&& put) {
  const int64_t half = job.rotary / 2;
  const float* cos = job.cos + row * half;
  const float* sin = job.sin + row * half;
  for (int64_t i = 0; i < half; i += kLanes) {
    const Lanes first = head.At(i), second = head.At(half + i);
    const Lanes c = Load(cos + i), s = Load(sin + i);
    put(i, Sub(Mul(first, c), Mul(second, s)));
    put(half + i, Add(Mul(second, c), Mul(first, s)));
  }
  for (int64_t i = job.rotary; i < job.dim; i += kLanes) {
    put(i, head.At(i));
  }
}

// The queries, or the keys, of one row: `count` heads, which are multiplied by `factor` at the end.
inline void Heads(const RotateJob& job, const uint16_t* from, const uint16_t* norm, int64_t count, int64_t row,
                  float factor, uint16_t* to) {
  const bool together = norm && job.norms == HeadNorms::kAll, after = job.norms == HeadNorms::kAfter;
  const uint16_t* weights = after ? norm : nullptr;  // those after the rotation
  norm = after ? nullptr : norm;
  const float all = together ? InverseRms(from, count * job.dim, job.eps) : 1.0f;
  for (int64_t h = 0; h < count; ++h, from += job.dim, to += job.dim) {
    Head head{from, norm, Fill(all), Fill(job.offset)};
    if (together) {
      norm += job.dim;
    } else if (norm) {
      head.inverse = Fill(InverseRms(from, job.dim, job.eps));
    }
    float last = factor;
    if (after) {
      Lanes squares = Fill(0.0f);
      Turn(job, head, row, [&](int64_t, Lanes value) { squares = Add(squares, Mul(value, value)); });
      last *= InverseRms(squares, job.dim, job.eps);
    }
    if (weights) {
      Turn(job, head, row, [&](int64_t i, Lanes value) {
        StoreBf16(to + i, Mul(Mul(value, Fill(last)), Add(head.offset, LoadBf16(weights + i))));
      });
    } else if (last == 1.0f) {
      Turn(job, head, row, [&](int64_t i, Lanes value) { StoreBf16(to + i, value); });
    } else {
      Turn(job, head, row, [&](int64_t i, Lanes value) { StoreBf16(to + i, Mul(value, Fill(last))); });
    }
  }
}

inline void Values(const RotateJob& job, const uint16_t* from, int64_t row) {
  uint16_t* to = job.v + row * job.kv_heads * job.dim;
  if (!job.v_norm) {
    memcpy(to, from, job.kv_heads * job.dim * sizeof(uint16_t));
    return;
  }
  for (int64_t h = 0; h < job.kv_heads; ++h, from += job.dim, to += job.dim) {
    const Head head{from, nullptr, Fill(InverseRms(from, job.dim, job.eps)), Fill(0.0f)};
    for (int64_t i = 0; i < job.dim; i += kLanes) {
      StoreBf16(to + i, head.At(i));
    }
  }
}

inline void Rows(const RotateJob& job, int64_t first, int64_t last) {
  const int64_t q_size = job.heads * job.dim, kv_size = job.kv_heads * job.dim;
  const int64_t row_size = q_size + (job.values_are_keys ? 1 : 2) * kv_size;
  for (int64_t row = first; row < last; ++row) {
    const uint16_t* q = job.qkv + row * row_size;
    const uint16_t* k = q + q_size;
    Heads(job, q, job.q_norm, job.heads, row, job.q_scale ? job.q_scale[row] : 1.0f, job.q + row * q_size);
    if (job.kv_heads == 0) {
      continue;
    }
    Heads(job, k, job.k_norm, job.kv_heads, row, 1.0f, job.k + row * kv_size);
    Values(job, job.values_are_keys ? k : k + kv_size, row);
  }
}

}  // namespace
}  // namespace penstock
