// Selection by weight without sorting: distances are put in bins, then the members of the one bin that matters in finer
// ones. The first bins are of equal width, which spreads logits best; the others follow the leading bits of floats, so
// that any distances at all come apart in three rounds.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "sample/sample_row.h"

namespace penstock {
namespace {

constexpr int kBins = 2048;
constexpr int kShifts[] = {20, 9, 0};  // of the bits of floats; the sign, which only -0 has, falls out
constexpr int64_t kFew = 128;          // are sorted
constexpr float kTiny = 1e-30f;

// What is left to search.
struct Members {
  const float* distances;
  const float* weights;
  int64_t count;
  double before, need;  // the weight of all that is nearer; what is to be reached
};

// Those in the bin where `need` is reached, kept in `distances` and `weights`. `bin_of` never falls as distances grow.
template <typename Bin>
Members Narrow(const Members& from, Bin bin_of, float* distances, float* weights) {
  double bins[kBins] = {};
  for (int64_t i = 0; i < from.count; ++i) {
    bins[bin_of(from.distances[i])] += from.weights[i];
  }
  Members to{distances, weights, 0, from.before, from.need};
  int bin = 0, last = 0;
  for (; bin < kBins && to.before + bins[bin] < to.need; ++bin) {
    if (bins[bin] > 0.0) {
      last = bin;
    }
    to.before += bins[bin];
  }
  if (bin == kBins) {  // all fall short, if only by rounding: the last that has any weight
    bin = last;
    to.need = HUGE_VAL;
  }
  for (int64_t i = 0; i < from.count; ++i) {
    if (bin_of(from.distances[i]) != bin) {
      continue;
    }
    const float weight = from.weights[i];
    distances[to.count] = from.distances[i];
    weights[to.count++] = weight;
  }
  return to;
}

}  // namespace

float SampleReach(int64_t count, float farthest, double before, double need, const SampleWork& work) {
  Members left{work.distances, work.weights, count, before, need};
  if (left.count > kFew && farthest > kTiny) {
    const float factor = kBins / farthest;
    const auto bin = [factor](float distance) { return std::min(static_cast<int>(distance * factor), kBins - 1); };
    left = Narrow(left, bin, work.left, work.left_weights);
  }
  for (const int shift : kShifts) {
    if (left.count <= kFew) {
      break;
    }
    const auto bin = [shift](float distance) {
      uint32_t bits;
      memcpy(&bits, &distance, 4);
      return static_cast<int>((bits >> shift) % kBins);
    };
    left = Narrow(left, bin, work.left, work.left_weights);
  }
  std::pair<float, float> few[kFew];
  const int64_t num_few = std::min(left.count, kFew);  // if there are more, all are alike
  for (int64_t i = 0; i < num_few; ++i) {
    few[i] = {left.distances[i], left.weights[i]};
  }
  std::sort(few, few + num_few);
  double sum = left.before;
  for (int64_t i = 0; i < num_few; ++i) {
    sum += few[i].second;
    if (sum >= left.need) {
      return few[i].first;
    }
  }
  return few[num_few - 1].first;
}

}  // namespace penstock
