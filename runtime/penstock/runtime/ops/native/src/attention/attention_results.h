// What becomes of the sums of splits: they are merged in ascending order, by the thread that computes all of them or,
// as partials, by the one that finishes last, and written as the output.
#pragma once

#include "attention/attention_kernel.h"

namespace penstock {
namespace {

// Merges b, whose keys come after those of a, into a.
inline void Merge(Sums& a, const Sums& b, int cols, int64_t dim) {
  alignas(64) float keep[kCols], add[kCols];
  for (int col = 0; col < cols; col += Vec::kWidth) {
    const Vec::F pa = Vec::Load(a.peak + col), pb = Vec::Load(b.peak + col), peak = Vec::Max(pa, pb);
    const Vec::F ka = Exp2(Vec::Sub(pa, peak)), kb = Exp2(Vec::Sub(pb, peak));
    Vec::Store(keep + col, ka);
    Vec::Store(add + col, kb);
    Vec::Store(a.total + col, Vec::Fma(Vec::Load(b.total + col), kb, Vec::Mul(Vec::Load(a.total + col), ka)));
    Vec::Store(a.peak + col, peak);
  }
  for (int col = 0; col < cols; ++col) {
    const Vec::F ka = Vec::Set(keep[col]), kb = Vec::Set(add[col]);
    float* to = a.values + col * dim;
    const float* from = b.values + col * dim;
    for (int64_t d = 0; d < dim; d += Vec::kWidth) {
      Vec::Store(to + d, Vec::Fma(Vec::Load(from + d), kb, Vec::Mul(Vec::Load(to + d), ka)));
    }
  }
}

inline void Clear(Sums& sums, int64_t dim) {
  for (int i = 0; i < kCols; ++i) {
    sums.peak[i] = kNothing;
    sums.total[i] = 0.0f;
  }
  memset(sums.values, 0, kCols * dim * 4);
}

// Writes one column's output. A sink is one more score, without a value. A query that has seen no key gets 0.
inline void WriteColumn(const AttentionJob& job, const Sums& sums, int col, int64_t token, int64_t head) {
  float peak = sums.peak[col], total = sums.total[col], factor = 1.0f;
  if (job.sinks) {
    const float sink = job.sinks[head] * kLog2E, top = sink > peak ? sink : peak;
    alignas(64) float e[kCols] = {peak - top, sink - top};
    Vec::Store(e, Exp2(Vec::Load(e)));
    factor = e[0];
    total = total * e[0] + e[1];
  }
  const Vec::F scale = Vec::Set(total == 0.0f ? 0.0f : factor / total);
  char* out = job.out + (token * job.heads + head) * job.value_dim * job.element();
  const float* values = sums.values + col * job.value_dim;
  for (int64_t d = 0; d < job.value_dim; d += Vec::kWidth) {
    const Vec::F x = Vec::Mul(Vec::Load(values + d), scale);
    if (job.bf16) {
      Vec::StoreNarrow(reinterpret_cast<uint16_t*>(out) + d, x);
    } else {
      Vec::Store(reinterpret_cast<float*>(out) + d, x);
    }
  }
}

// Writes the output of a tile's columns.
inline void WriteColumns(const AttentionJob& job, const Columns& c, const Sums& sums) {
  for (int col = 0; col < c.count; ++col) {
    WriteColumn(job, sums, col, c.token[col], c.head[col]);
  }
}

// Stores a split's sums in the partials of the tokens that attend to it.
inline void StorePartials(const AttentionJob& job, const Columns& c, const Sums& sums, bool empty, int64_t split,
                          int64_t kv_head) {
  const int64_t group = job.group();
  for (int col = 0; col < c.count; ++col) {
    if (split < c.oldest[col] / kSplit || split > c.newest[col] / kSplit) {
      continue;
    }
    float* to = job.partial(c.token[col], split, kv_head);
    const int64_t g = c.head[col] - kv_head * group;
    to[g] = empty ? kNothing : sums.peak[col];
    to[group + g] = empty ? 0.0f : sums.total[col];
    float* values = to + 2 * group + g * job.value_dim;
    if (empty) {
      memset(values, 0, job.value_dim * 4);
    } else {
      memcpy(values, sums.values + col * job.value_dim, job.value_dim * 4);
    }
  }
}

// Records that `done` splits of a token are finished. The thread that finishes the last one merges all of them, in
// ascending order.
inline void FinishToken(const AttentionJob& job, int32_t token, int64_t kv_head, int done, Sums& a) {
  if (job.pending[token * job.kv_heads + kv_head].fetch_sub(done, std::memory_order_acq_rel) != done) {
    return;
  }
  const int64_t group = job.group();
  for (int64_t g = 0; g < group; g += kCols) {
    const int cols = Min(kCols, static_cast<int>(group - g));
    Clear(a, job.value_dim);
    Sums part;
    for (int64_t s = job.oldest[token] / kSplit; s <= job.newest[token] / kSplit; ++s) {
      const float* from = job.partial(token, s, kv_head);
      memcpy(part.peak, from + g, cols * 4);
      memcpy(part.total, from + group + g, cols * 4);
      for (int i = cols; i < kCols; ++i) {
        part.peak[i] = part.total[i] = 0.0f;
      }
      part.values = const_cast<float*>(from) + 2 * group + g * job.value_dim;
      Merge(a, part, cols, job.value_dim);
    }
    for (int col = 0; col < cols; ++col) {
      WriteColumn(job, a, col, token, kv_head * group + g + col);
    }
  }
}

}  // namespace
}  // namespace penstock
