// The kernel of norm.h, compiled once per instruction set.
#pragma once

#include "common/lanes.h"
#include "common/rms.h"
#include "norm/norm.h"

namespace penstock {
namespace {

constexpr int64_t kLanes = 16;

inline void NormRun(const NormJob& job, int64_t at) {
  const Lanes inverse = Fill(job.normed ? InverseRms(job.x + at, job.size, job.eps) : 1.0f);
  const Lanes offset = Fill(job.offset), scale = Fill(job.scale), factor = Fill(job.factor);
  for (int64_t i = 0; i < job.size; i += kLanes) {
    Lanes value = Mul(LoadBf16(job.x + at + i), inverse);
    if (job.norm) {
      value = Mul(value, Add(offset, LoadBf16(job.norm + i)));
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
