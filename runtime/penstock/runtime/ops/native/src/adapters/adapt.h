// Adapters of rows of any mix, in loops over the pool.
#pragma once

#include <cstdint>
#include <vector>

#include "adapters/adapters.h"
#include "xla/ffi/api/ffi.h"

namespace penstock {

// The sizes of a layer; see adapters.h.
struct AdapterSizes {
  int64_t k, rank;
  std::vector<int64_t> parts;  // numbers of outputs, which lie side by side in y

  int64_t Outputs() const;
  int64_t NumValues() const;  // of all matrices
  bool AreMultiples() const;
};

// Computes y of all rows, which are sorted here by their matrices. Throws std::bad_alloc. Returns false if there is no
// kernel for this processor.
bool Adapt(xla::ffi::ThreadPool& threads, const AdapterSizes& sizes, std::vector<AdaptedRow>& rows);

}  // namespace penstock
