// The softmax of attention_lanes.h: scores and probabilities are [column][kSplit keys], and a vector's lanes are keys.
#pragma once

#include "attention/attention_kernel.h"

namespace penstock {
namespace {

// Computes the softmax, as Softmax does, and prefetches what is left. The terms of a total are added up first by key
// modulo kKeyTile.
inline void SoftmaxLanes(const AttentionJob& job, const Columns& c, const Part& part, float* scores, float* out,
                         Sums& sums, Fetch& fetch) {
  constexpr int kVecs = kKeyTile / Vec::kWidth;
  const int64_t fetch_bytes = fetch.Left() / (c.count * (part.last - part.first) / kKeyTile);
  const bool cap = job.softcap > 0.0f, slopes = job.slopes;
  const Vec::F factor = Vec::Set(cap || slopes ? 1.0f : job.scale * kLog2E), nothing = Vec::Set(-__builtin_inff());
  for (int col = 0; col < c.count; ++col) {
    float *at = scores + col * kSplit, *to = out + col * kSplit;
    const int oldest = c.oldest[col] - part.start, newest = c.newest[col] - part.start;
    Vec::F highest[kVecs];
    for (auto& h : highest) {
      h = nothing;
    }
    for (int tile = part.first; tile < part.last; tile += kKeyTile) {
      const bool masked = tile < oldest || tile + kKeyTile - 1 > newest;
      for (int v = 0; v < kVecs; ++v) {
        const int key = tile + v * Vec::kWidth;
        Vec::F x = Vec::Load(at + key);
        if (cap) {
          x = Vec::Mul(Tanh(Vec::Mul(x, Vec::Set(job.scale / job.softcap))), Vec::Set(job.softcap * kLog2E));
        } else if (slopes) {
          x = Vec::Mul(x, Vec::Set(job.scale * kLog2E));
        }
        if (slopes) {
          const Vec::F keys = Vec::Add(Vec::Lane(), Vec::Set(static_cast<float>(part.start + key)));
          x = Vec::Fma(Vec::Set(c.slopes[col]), Vec::Sub(keys, Vec::Set(c.at[col])), x);
        }
        if (masked) {
          x = Vec::Between(x, key, oldest, newest);
        }
        if (masked || cap || slopes) {
          Vec::Store(at + key, x);
        }
        highest[v] = Vec::Max(highest[v], x);
      }
    }
    for (int v = 1; v < kVecs; ++v) {
      highest[0] = Vec::Max(highest[0], highest[v]);
    }
    const Vec::F peak = Vec::Max(Vec::Set(kNothing), Vec::Mul(Vec::Set(Vec::Highest(highest[0])), factor));
    const Vec::F minus_peak = Vec::Sub(Vec::Set(0.0f), peak);
    Vec::F totals[kVecs];
    for (auto& t : totals) {
      t = Vec::Set(0.0f);
    }
    for (int tile = part.first; tile < part.last; tile += kKeyTile) {
      fetch.Advance(fetch_bytes);
      for (int v = 0; v < kVecs; ++v) {
        const int key = tile + v * Vec::kWidth;
        const Vec::F p = Exp2(Vec::Fma(Vec::Load(at + key), factor, minus_peak));
        totals[v] = Vec::Add(totals[v], p);
        Vec::Store(to + key, part.value_scales ? Vec::Mul(p, Vec::Load(part.value_scales + key)) : p);
      }
    }
    alignas(64) float parts[kKeyTile], peaks[kKeyTile];
    for (int v = 0; v < kVecs; ++v) {
      Vec::Store(parts + v * Vec::kWidth, totals[v]);
    }
    for (int half = kKeyTile / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) {
        parts[i] += parts[i + half];
      }
    }
    Vec::Store(peaks, peak);
    sums.peak[col] = peaks[0];
    sums.total[col] = parts[0];
  }
  for (int col = c.count; col < kCols; ++col) {
    sums.peak[col] = kNothing, sums.total[col] = 0.0f;
  }
}

}  // namespace
}  // namespace penstock
