#include "sample/sample_row.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "common/carver.h"
#include "common/common.h"
#include "sample/sample_codes.h"

namespace penstock {
namespace {

constexpr float kTiny = 1e-30f, kHuge = 1e30f;  // far from values that overflow in float32 or become 0

// Draws an index by inverse CDF. Only an entry with mass is ever drawn, whatever the rounding of the sums.
int64_t FirstPast(const float* masses, int64_t count, float uniform) {
  double total = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    total += masses[i];
  }
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    sum += masses[i];
    if (sum > uniform * total && masses[i] > 0.0f) {
      return i;
    }
  }
  return std::max_element(masses, masses + count) - masses;
}

// Samples the token of one row.
class RowSampler {
 public:
  RowSampler(const SampleKernel& kernel, const SampleRow& row, const SampleWork& work, const EachBlock& each)
      : kernel_(kernel), row_(row), work_(work), each_(each) {}

  void Choose(const SampleResult& result) {
    Build();
    const float raw_peak = kernel_.peak(work_.raw_peaks, chunks_);
    if (std::any_of(work_.broken, work_.broken + blocks_, [](bool b) { return b; }) || !std::isfinite(raw_peak)) {
      *result.token = kNonFinite;
      return;
    }
    if (row_.num_top >= 0) {
      LogProbs(raw_peak, result);
    }
    *result.token = static_cast<int32_t>(Token(raw_peak));
    if (row_.num_top >= 0) {
      *result.logprob = LogProb(row_.logits[*result.token]);
    }
  }

 private:
  void Build() {
    each_([&](int64_t block) { kernel_.build(row_, work_, block); });
    peak_ = kernel_.peak(work_.peaks, chunks_);
  }

  int64_t Token(float raw_peak) {
    if (peak_ == -HUGE_VALF) {  // no token is left: now only the mask counts
      row_.bias = nullptr;
      row_.num_stop_ids = 0;
      Build();
    }
    if (peak_ == -HUGE_VALF) {  // the mask allows no token, or none with a probability
      for (int64_t id = 0; row_.mask && id < row_.vocab; ++id) {
        if (row_.mask[id / 32] >> (id % 32) & 1) {
          return id;
        }
      }
      return FindIn(row_.logits, work_.raw_peaks, raw_peak);
    }
    return row_.floats[kTemperature] > 0.0f ? Draw() : FindIn(x(), work_.peaks, peak_);
  }

  const float* x() const { return row_.edited() ? work_.x : row_.logits; }
  int64_t ChunkSize(int64_t chunk) const { return std::min(kSampleChunk, row_.vocab - chunk * kSampleChunk); }

  // Returns the first id of the largest value.
  int64_t FindIn(const float* values, const float* peaks, float peak) const {
    const int64_t chunk = kernel_.find(peaks, chunks_, peak), first = chunk * kSampleChunk;
    return first + kernel_.find(values + first, ChunkSize(chunk), peak);
  }

  int64_t Draw() {
    const float temperature = std::min(std::max(row_.floats[kTemperature], kTiny), kHuge);
    scale_ = kLog2E / temperature;
    const float limit = row_.floats[kMinP] > 0.0f ? -std::log(row_.floats[kMinP]) * temperature : HUGE_VALF;
    float reach = HUGE_VALF;
    if (row_.ints[kTopK] > 0 && row_.ints[kTopK] < row_.vocab) {
      reach = CutTopK();
    }
    if (row_.floats[kTopP] < 1.0f) {
      reach = std::min(reach, CutTopP(reach, limit));
    }
    reach = std::min(reach, limit);
    WeighChunks(reach);
    const int64_t chunk = FirstPast(work_.masses, chunks_, row_.uniforms[0]);
    const int64_t first = chunk * kSampleChunk, size = ChunkSize(chunk);
    for (int64_t i = 0; i < size; ++i) {
      const float distance = peak_ - x()[first + i];
      work_.distances[i] = distance <= reach ? distance : HUGE_VALF;
    }
    kernel_.weigh(work_.distances, size, scale_, work_.weights);
    return first + FirstPast(work_.weights, size, row_.uniforms[1]);
  }

  // The distance up to which top_k keeps tokens.
  float CutTopK() {
    // The k-th largest of some of the tokens is a bound. They are the largest tokens of all chunks, or of all lanes of
    // all chunks.
    float bound = FLT_MAX;
    const int64_t k = row_.ints[kTopK];
    const float* of = k <= chunks_ ? work_.peaks : work_.lane_peaks;
    const int64_t count = k <= chunks_ ? chunks_ : chunks_ * kernel_.lanes;
    if (k <= count) {
      std::copy_n(of, count, work_.order);
      std::nth_element(work_.order, work_.order + (k - 1), work_.order + count, std::greater<float>());
      bound = std::min(bound, peak_ - work_.order[k - 1]);
    }
    return Reach(0.0f, static_cast<double>(k), static_cast<double>(row_.vocab), bound);
  }

  // The distance up to which top_p keeps tokens, among those up to `reach`. Beyond `limit` no token is kept anyway.
  float CutTopP(float reach, float limit) {
    WeighChunks(reach);
    double total = 0.0;
    for (int64_t c = 0; c < chunks_; ++c) {
      total += work_.masses[c];
    }
    // If all tokens of the vocabulary had this weight, they would add up to half of what may be missing; half, because
    // of rounding. So lighter tokens need not be searched.
    const double light = (1.0 - row_.floats[kTopP]) * total / (2.0 * static_cast<double>(row_.vocab));
    const double bound = std::min<double>({-std::log2(light) / scale_, reach, limit, FLT_MAX});
    const double share = std::max(row_.floats[kTopP], kTiny);  // the largest is kept even if top_p is 0
    return Reach(scale_, share * total, total, static_cast<float>(bound));
  }

  // The smallest distance up to which the weights under `scale` add up to at least `need`; the largest one up to
  // `bound` if they do not. `total` is the sum of all weights.
  float Reach(float scale, double need, double total, float bound) {
    SampleRange range{peak_, scale, -1.0f, bound};
    if (row_.vocab > kSampleBlock) {
      Guess(need / total, &range);
    }
    double before = Collect(range);
    if (range.near >= 0.0f || range.far < bound) {
      const double reached = std::accumulate(work_.weights, work_.weights + count_, before);
      if (!count_ || before >= need || reached < need) {  // the guess was wrong
        range.near = -1.0f, range.far = bound;
        before = Collect(range);
      }
    }
    return SampleReach(count_, kernel_.peak(work_.distances, count_), before, need, work_);
  }

  // If there are many distances, narrows the range to where `share` of the weight is reached, with a margin. The place
  // is estimated from 16 tokens of each chunk.
  void Guess(double share, SampleRange* range) {
    int64_t all = 0, inside = 0;
    count_ = 0;
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      const int64_t size = std::min<int64_t>(16, ChunkSize(chunk));
      all += size;
      for (int64_t i = 0; i < size; ++i) {
        const float distance = peak_ - x()[chunk * kSampleChunk + i];
        work_.distances[count_] = distance;
        count_ += distance <= FLT_MAX;
        inside += distance <= range->far;
      }
    }
    if (inside < all / 8) {
      return;
    }
    kernel_.weigh(work_.distances, count_, range->scale, work_.weights);
    const double total =
        range->scale > 0.0f ? std::accumulate(work_.weights, work_.weights + count_, 0.0) : static_cast<double>(all);
    const double margin = 6.0 * std::sqrt(share * (1.0 - share) / static_cast<double>(all));
    const float farthest = kernel_.peak(work_.distances, count_);
    const auto at = [&](double part) { return SampleReach(count_, farthest, 0.0, part * total, work_); };
    if (share > margin) {
      range->near = at(share - margin);
    }
    if (share + margin < 1.0) {
      range->far = std::min(range->far, at(share + margin));
    }
  }

  // Collects the distances in the range with their weights. Returns the weight of smaller distances.
  double Collect(const SampleRange& range) {
    each_([&](int64_t block) { kernel_.collect(row_, work_, block, range); });
    double nearer = 0.0;
    count_ = 0;
    for (int64_t block = 0; block < blocks_; ++block) {
      nearer += work_.nearer[block];
      memmove(work_.distances + count_, work_.distances + block * kSampleBlock, work_.counts[block] * sizeof(float));
      count_ += work_.counts[block];
    }
    kernel_.weigh(work_.distances, count_, range.scale, work_.weights);
    return nearer;
  }

  void WeighChunks(float reach) {
    each_([&](int64_t block) { kernel_.weigh_chunks(row_, work_, block, peak_, scale_, reach); });
  }

  float LogProb(float logit) const { return static_cast<float>(static_cast<double>(logit) - log_sum_); }

  void LogProbs(float peak, const SampleResult& result) {
    double sum = 0.0;
    for (int64_t block = 0; block < blocks_; ++block) {
      const int64_t chunk = block * (kSampleBlock / kSampleChunk);
      const float block_peak =
          kernel_.peak(work_.raw_peaks + chunk, std::min(kSampleBlock / kSampleChunk, chunks_ - chunk));
      sum += work_.sums[block] * std::exp(static_cast<double>(block_peak) - static_cast<double>(peak));
    }
    log_sum_ = static_cast<double>(peak) + std::log(sum);
    // The next largest logit is the largest of its chunk, or of the rest of a chunk from which logits were taken. So
    // only such chunks are copied, and a logit that was taken is removed from the copy.
    float* peaks = work_.order;
    std::copy_n(work_.raw_peaks, chunks_, peaks);
    std::fill_n(work_.top_rows, chunks_, -1);
    const int64_t wanted = std::min(row_.num_top, row_.vocab);
    int64_t rank = 0, copies = 0;
    for (; rank < wanted; ++rank) {
      const float value = kernel_.peak(peaks, chunks_);
      if (value == -HUGE_VALF) {
        break;
      }
      const int64_t chunk = kernel_.find(peaks, chunks_, value), first = chunk * kSampleChunk;
      if (work_.top_rows[chunk] < 0) {
        work_.top_rows[chunk] = copies++;
        std::copy_n(row_.logits + first, ChunkSize(chunk), work_.tops + work_.top_rows[chunk] * kSampleChunk);
      }
      float* copy = work_.tops + work_.top_rows[chunk] * kSampleChunk;
      const int64_t inside = kernel_.find(copy, ChunkSize(chunk), value);
      result.top_ids[rank] = static_cast<int32_t>(first + inside);
      result.top_logprobs[rank] = LogProb(row_.logits[first + inside]);
      copy[inside] = -HUGE_VALF;
      peaks[chunk] = kernel_.peak(copy, ChunkSize(chunk));
    }
    for (int64_t id = 0; rank < wanted; ++id) {  // all tokens that are left are impossible
      if (row_.logits[id] != -HUGE_VALF) {
        continue;
      }
      result.top_ids[rank] = static_cast<int32_t>(id);
      result.top_logprobs[rank++] = -HUGE_VALF;
    }
  }

  const SampleKernel& kernel_;
  SampleRow row_;
  const SampleWork& work_;
  const EachBlock& each_;
  const int64_t chunks_ = SampleChunks(row_.vocab), blocks_ = SampleBlocks(row_.vocab);
  float peak_ = 0.0f, scale_ = 0.0f;
  int64_t count_ = 0;  // the number of distances
  double log_sum_ = 0.0;
};

}  // namespace

SampleWork CarveSample(char* memory, int64_t vocab, int64_t num_top, int64_t* bytes) {
  const int64_t chunks = SampleChunks(vocab), blocks = SampleBlocks(vocab), padded = blocks * kSampleBlock;
  constexpr int64_t kSpare = kSampleLanes * 4;  // room behind an array, because kernels write whole vectors
  Carver carver(memory);
  SampleWork work;
  work.x = carver.Take<float>(padded, kSpare);
  work.raw_peaks = carver.Take<float>(chunks, kSpare);
  work.peaks = carver.Take<float>(chunks, kSpare);
  work.lane_peaks = carver.Take<float>(chunks * kSampleLanes, kSpare);
  work.sums = carver.Take<double>(blocks, kSpare);
  work.broken = carver.Take<bool>(blocks, kSpare);
  work.masses = carver.Take<float>(chunks, kSpare);
  work.counts = carver.Take<int64_t>(blocks, kSpare);
  work.nearer = carver.Take<double>(blocks, kSpare);
  work.distances = carver.Take<float>(padded, kSpare);
  work.weights = carver.Take<float>(padded, kSpare);
  work.left = carver.Take<float>(padded, kSpare);
  work.left_weights = carver.Take<float>(padded, kSpare);
  work.order = carver.Take<float>(chunks * kSampleLanes, kSpare);
  work.tops = carver.Take<float>(num_top * kSampleChunk, kSpare);
  work.top_rows = carver.Take<int64_t>(chunks, kSpare);
  *bytes = carver.used();
  return work;
}

void SampleToken(const SampleKernel& kernel, const SampleRow& row, const SampleWork& work, const EachBlock& each,
                 const SampleResult& result) {
  RowSampler(kernel, row, work, each).Choose(result);
}

}  // namespace penstock
