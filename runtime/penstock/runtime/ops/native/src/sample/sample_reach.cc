// Selection by weight without sorting: distances are put into bins, then the members of the one bin that matters into
// finer bins. The first bins are of equal width, which spreads logits best. The later ones follow the leading bits of
// floats, so that three rounds separate any distances.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "sample/sample_row.h"

namespace penstock {
namespace {

constexpr int kBins = 2048;
constexpr int kShifts[] = {20, 9, 0};  // shifts of the bits of floats; the sign bit, which only -0 has, is dropped
constexpr int64_t kFew = 128;          // so few members are sorted
constexpr float kTiny = 1e-30f;

// The distances that are left to search.
struct Members {
  const float* distances;
  const float* weights;
  int64_t count;
  double before, need;  // the weight of all smaller distances; the weight to be reached
};

// The members in the bin in which `need` is reached, written to `distances` and `weights`. `bin_of` must not decrease
// as distances grow.
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
  if (bin == kBins) {  // the whole weight falls short, if only by rounding: takes the last bin with any weight
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
  const int64_t num_few = std::min(left.count, kFew);  // if there are more, they are all equal
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
