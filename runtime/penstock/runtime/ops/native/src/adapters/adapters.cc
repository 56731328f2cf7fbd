#include "adapters/adapters.h"

#include <algorithm>
#include <functional>
#include <iterator>

#include "common/common.h"
#include "common/cpu.h"
#include "common/scratch.h"

namespace penstock {
namespace {

// With so many groups for each thread, all parts of a group are one unit of work: threads end at about one time.
constexpr int64_t kGroupsOfThread = 4;

}  // namespace

int64_t AdapterSizes::Outputs() const {
  int64_t sum = 0;
  for (const int64_t outputs : parts) {
    sum += outputs;
  }
  return sum;
}

int64_t AdapterSizes::NumValues() const { return (static_cast<int64_t>(parts.size()) * k + Outputs()) * rank; }

bool AdapterSizes::AreMultiples() const {
  return rank > 0 && k % 16 == 0 && rank % 16 == 0 &&
         std::all_of(parts.begin(), parts.end(), [](int64_t outputs) { return outputs % 16 == 0; });
}

ProductsWithA::ProductsWithA(const AdapterSizes& sizes, const std::vector<AdaptedRow>& rows, int64_t num_threads)
    : sizes_(sizes), times_a_(ForCurrentIsa<TimesA*>(TimesAAvx2, TimesAAvx512, TimesAAvx512, TimesAAvx512)) {
  std::copy_if(rows.begin(), rows.end(), std::back_inserter(rows_), [](const AdaptedRow& row) { return row.matrices; });
  std::stable_sort(rows_.begin(), rows_.end(), [](const AdaptedRow& a, const AdaptedRow& b) {
    return std::less<const uint16_t*>()(a.matrices, b.matrices);
  });
  for (const AdaptedRow& row : rows_) {
    if (groups_.empty() || groups_.back().rows->matrices != row.matrices || groups_.back().count == kRowsTogether) {
      groups_.push_back({&row, 0});
    }
    ++groups_.back().count;
  }
  const bool has_many = static_cast<int64_t>(groups_.size()) >= kGroupsOfThread * num_threads;
  units_of_group_ = has_many ? 1 : static_cast<int64_t>(sizes.parts.size());
}

void ProductsWithA::RunUnit(int64_t unit) const {
  const int64_t first = units_of_group_ > 1 ? unit % units_of_group_ : 0;
  const int64_t last = units_of_group_ > 1 ? first + 1 : static_cast<int64_t>(sizes_.parts.size());
  float* wide = reinterpret_cast<float*>(Scratch<struct AdapterWide>(kRowsTogether * WideStride(sizes_.k) * 4));
  times_a_(groups_[unit / units_of_group_], sizes_.k, sizes_.rank, first, last, wide);
}

}  // namespace penstock
