// The sweeps of sample.h over a block, compiled once per instruction set.
#pragma once

#include <cfloat>

#include "common/common.h"
#include "sample/sample.h"
#include "sample/sample_codes.h"
#include "sample/sample_vec.h"

namespace penstock {
namespace {

// Token ids from begin to end - 1.
struct IdRange {
  int64_t begin, end;
};

inline IdRange IdsOfBlock(const SampleRow& row, int64_t block) {
  return {block * kSampleBlock, Min(row.vocab, (block + 1) * kSampleBlock)};
}

inline const float* X(const SampleRow& row, const SampleWork& work) { return row.edited() ? work.x : row.logits; }

// Applies Hugging Face's penalty, then OpenAI's.
inline F Penalise(const SampleRow& row, I history, M seen, F x) {
  const F repetition = Vec::Set(row.floats[kRepetitionPenalty]);
  const F count = LowBits(history, kInPromptBit);
  const F repeated = Vec::Less(Vec::Set(0.0f), x, Vec::Div(x, repetition), Vec::Mul(x, repetition));
  const F present = Vec::Less(Vec::Set(0.0f), count, Vec::Set(row.floats[kPresencePenalty]), Vec::Set(0.0f));
  const F less = Vec::Sub(repeated, Vec::Add(Vec::Mul(Vec::Set(row.floats[kFrequencyPenalty]), count), present));
  return Choose(seen, less, x);
}

template <bool kEdited>
void BuildBlock(const SampleRow& row, const SampleWork& work, int64_t block) {
  const F lowest = Vec::Set(-kInfinity), highest = Vec::Set(FLT_MAX);
  const IdRange ids = IdsOfBlock(row, block);
  M broken = NoLane();
  F block_peak = lowest;
  for (int64_t begin = ids.begin; begin < ids.end; begin += kSampleChunk) {
    const int64_t chunk = begin / kSampleChunk, end = Min(ids.end, begin + kSampleChunk);
    F raw_peak = lowest, peak = lowest;
    for (int64_t i = begin; i < end; i += kWidth) {
      F x = LoadUpTo(row.logits + i, end - i);
      broken = Or(broken, IsNan(x));
      raw_peak = Vec::Max(x, raw_peak);
      if constexpr (kEdited) {
        if (row.history) {
          const I history = LoadIntsUpTo(row.history + i, end - i);
          const M seen = NonZero(history);
          if (Bits(seen)) {
            x = Penalise(row, history, seen, x);
          }
        }
        if (row.bias) {
          x = Vec::Add(x, LoadUpTo(row.bias + i, end - i));
        }
        if (row.mask) {
          x = Choose(PackedLanes(row.mask, i), x, lowest);
        }
        x = Vec::Min(x, highest);  // a tiny repetition penalty or the sum of two large numbers may have overflowed
        Vec::Store(work.x + i, x);
        peak = Vec::Max(x, peak);
      }
    }
    if (!kEdited) {
      peak = raw_peak;
    }
    Vec::Store(work.lane_peaks + chunk * kWidth, peak);
    work.raw_peaks[chunk] = Largest(raw_peak);
    work.peaks[chunk] = Largest(peak);
    block_peak = Vec::Max(raw_peak, block_peak);
  }
  work.broken[block] = Bits(broken);
  if (row.num_top < 0) {
    return;
  }
  const float largest = Largest(block_peak);
  const F peak = Vec::Set(largest);
  double sum = 0.0;
  for (int64_t begin = ids.begin; begin < ids.end && largest > -kInfinity; begin += kSampleChunk) {
    const int64_t end = Min(ids.end, begin + kSampleChunk);
    F part = Vec::Set(0.0f);
    for (int64_t i = begin; i < end; i += kWidth) {
      const F below = Vec::Sub(LoadUpTo(row.logits + i, end - i), peak);
      part = Vec::Add(part, Power(Vec::Mul(below, Vec::Set(kLog2E))));
    }
    sum += Sum(part);
  }
  work.sums[block] = sum;
}

inline float Peak(const float* x, int64_t count) {
  F peak = Vec::Set(-kInfinity);
  for (int64_t i = 0; i < count; i += kWidth) {
    peak = Vec::Max(LoadUpTo(x + i, count - i), peak);
  }
  return Largest(peak);
}

inline int64_t Find(const float* x, int64_t count, float value) {
  for (int64_t i = 0; i < count; i += kWidth) {
    const uint32_t here = Bits(Equal(LoadUpTo(x + i, count - i), Vec::Set(value)));
    if (here) {
      return i + __builtin_ctz(here);
    }
  }
  return 0;
}

inline void Build(const SampleRow& row, const SampleWork& work, int64_t block) {
  if (!row.edited()) {
    return BuildBlock<false>(row, work, block);
  }
  BuildBlock<true>(row, work, block);
  const IdRange ids = IdsOfBlock(row, block);
  for (int64_t s = 0; s < row.num_stop_ids; ++s) {
    const int64_t id = row.stop_ids[s];
    if (id < ids.begin || id >= ids.end) {
      continue;
    }
    work.x[id] = -kInfinity;
    const int64_t chunk = id / kSampleChunk, begin = chunk * kSampleChunk;
    const int64_t end = Min(ids.end, begin + kSampleChunk);
    F peak = Vec::Set(-kInfinity);
    for (int64_t i = begin; i < end; i += kWidth) {
      peak = Vec::Max(LoadUpTo(work.x + i, end - i), peak);
    }
    Vec::Store(work.lane_peaks + chunk * kWidth, peak);
    work.peaks[chunk] = Largest(peak);
  }
}

inline void WeighChunks(const SampleRow& row, const SampleWork& work, int64_t block, float peak, float scale,
                        float reach) {
  const float* x = X(row, work);
  const IdRange ids = IdsOfBlock(row, block);
  const F top = Vec::Set(peak), far = Vec::Set(reach), power = Vec::Set(-scale);
  for (int64_t begin = ids.begin; begin < ids.end; begin += kSampleChunk) {
    const int64_t chunk = begin / kSampleChunk, end = Min(ids.end, begin + kSampleChunk);
    F mass = Vec::Set(0.0f);
    if (peak - work.peaks[chunk] <= reach) {
      for (int64_t i = begin; i < end; i += kWidth) {
        const F distance = Vec::Sub(top, LoadUpTo(x + i, end - i));
        const M near = LessEqual(distance, far);
        if (Bits(near)) {
          mass = Vec::Add(mass, Choose(near, Power(Vec::Mul(distance, power)), Vec::Set(0.0f)));
        }
      }
    }
    work.masses[chunk] = Sum(mass);
  }
}

inline void Collect(const SampleRow& row, const SampleWork& work, int64_t block, const SampleRange& range) {
  const float* x = X(row, work);
  const IdRange ids = IdsOfBlock(row, block);
  const F top = Vec::Set(range.peak), near = Vec::Set(range.near), far = Vec::Set(range.far);
  const F power = Vec::Set(-range.scale);
  float *const first = work.distances + ids.begin, *to = first;
  double nearer = 0.0;
  for (int64_t begin = ids.begin; begin < ids.end; begin += kSampleChunk) {
    const int64_t end = Min(ids.end, begin + kSampleChunk);
    if (!(range.peak - work.peaks[begin / kSampleChunk] <= range.far)) {
      continue;
    }
    F weights = Vec::Set(0.0f);
    for (int64_t i = begin; i < end; i += kWidth) {
      const F distance = Vec::Sub(top, LoadUpTo(x + i, end - i));
      const M counted = LessEqual(distance, near), in = AndNot(LessEqual(distance, far), counted);
      if (Bits(counted)) {
        weights = Vec::Add(weights, Choose(counted, Power(Vec::Mul(distance, power)), Vec::Set(0.0f)));
      }
      if (Bits(in)) {
        Compress(to, in, distance);
        to += __builtin_popcount(Bits(in));
      }
    }
    nearer += Sum(weights);
  }
  work.counts[block] = to - first;
  work.nearer[block] = nearer;
}

inline void Weigh(const float* distances, int64_t count, float scale, float* weights) {
  const F power = Vec::Set(-scale);
  for (int64_t i = 0; i < count; i += kWidth) {
    Vec::Store(weights + i, Power(Vec::Mul(Vec::Load(distances + i), power)));
  }
}

}  // namespace
}  // namespace penstock
