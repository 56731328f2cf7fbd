// The kernel of norm.h, compiled once per instruction set.
#pragma once

#include "common/activate.h"
#include "common/lanes.h"
#include "common/rms.h"
#include "norm/norm.h"

namespace penstock {
namespace {

constexpr int64_t kLanes = 16;

// The mean of `size` channels, and 1 / the root of their variance and of eps, added up in the order of InverseRms.
inline void Centre(const uint16_t* x, int64_t size, float eps, Lanes* mean, Lanes* inverse) {
  Lanes total = Fill(0.0f), squares = Fill(0.0f);
  for (int64_t i = 0; i < size; i += kLanes) {
    total = Add(total, LoadBf16(x + i));
  }
  *mean = Fill(Total(total) / static_cast<float>(size));
  for (int64_t i = 0; i < size; i += kLanes) {
    const Lanes value = Sub(LoadBf16(x + i), *mean);
    squares = Add(squares, Mul(value, value));
  }
  *inverse = Fill(InverseRms(squares, size, eps));
}

inline void NormRun(const NormJob& job, int64_t at) {
  Lanes mean = Fill(0.0f), inverse = Fill(1.0f);
  if (job.centred) {
    Centre(job.x + at, job.size, job.eps, &mean, &inverse);
  } else if (job.normed) {
    inverse = Fill(InverseRms(job.x + at, job.size, job.eps));
  }
  const Lanes offset = Fill(job.offset), scale = Fill(job.scale), factor = Fill(job.factor);
  for (int64_t i = 0; i < job.size; i += kLanes) {
    Lanes value = LoadBf16(job.x + at + i);
    value = Mul(job.centred ? Sub(value, mean) : value, inverse);
    if (job.norm) {
      value = Mul(value, Add(offset, LoadBf16(job.norm + i)));
    }
    if (job.bias) {
      value = Add(value, LoadBf16(job.bias + i));
    }
    if (job.plain != Plain::kNone) {
      value = Activate(job.plain, value);
    }
    value = Mul(value, scale);
    if (job.residual) {
      value = Add(LoadBf16(job.residual + at + i), value);
    }
    StoreBf16(job.y + at + i, Mul(value, factor));
  }
}

inline void Rows(const NormJob& job, int64_t first, int64_t last) {
  for (int64_t at = first * job.channels; at < last * job.channels; at += job.size) {
    NormRun(job, at);
  }
}

}  // namespace
}  // namespace penstock
