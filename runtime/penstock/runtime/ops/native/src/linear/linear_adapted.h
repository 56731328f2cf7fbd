// What adapters add to the sums of a linear layer, compiled once per instruction set. In an unnamed namespace, like
// lanes.h.
#pragma once

#include "common/lanes.h"
#include "linear/linear.h"

namespace penstock {
namespace {

// Rows with the same adapter whose sums are made together: each line of B is read and widened once for them.
#if defined(__AVX512F__)
constexpr int kAdaptedRows = 8;
#else
constexpr int kAdaptedRows = 4;
#endif

// Where B of the row's adapter begins that belongs to a block of outputs; `column` is the block's first one.
inline const uint16_t* BlockOfB(const AdapterSizes& sizes, const AdaptedRow& row, int64_t column) {
  return row.matrices + (static_cast<int64_t>(sizes.parts.size()) * sizes.k + column) * sizes.rank;
}

// Begins to fetch into the second-level cache what AddAdapters will read of B for the rows [first, last) and for
// `blocks` neighbours: while the weights of these are multiplied, it comes. Later, each row would wait for it.
inline void FetchAdapters(const LinearJob& job, int64_t column, int64_t blocks, int64_t first, int64_t last) {
  const uint16_t* fetched = nullptr;
  for (int64_t r = first; r < last; ++r) {
    const AdaptedRow& row = job.adapted[r];
    if (!row.matrices || row.matrices == fetched) {
      continue;
    }
    fetched = row.matrices;
    const char* b = reinterpret_cast<const char*>(BlockOfB(*job.adapter_sizes, row, column));
    for (int64_t at = 0; at < blocks * kBlockOut * job.adapter_sizes->rank * 2; at += kLine) {
      __builtin_prefetch(b + at, 0, 2);
    }
  }
}

// sums [N][16] of N rows with one adapter += small of each times a block of B.
template <int N>
inline void AddProductsWithB(const AdaptedRow* rows, const uint16_t* b, int64_t rank, int64_t at, float* sums) {
  Lanes added[N];
  for (int n = 0; n < N; ++n) {
    added[n] = Fill(0.0f);
  }
  for (int64_t r = 0; r < rank; r += 2) {
    Lanes values[2];
    LoadPairs(b + r * kBlockOut, &values[0], &values[1]);
    for (int64_t i = 0; i < 2; ++i) {
      for (int n = 0; n < N; ++n) {
        added[n] = MulAdd(Fill(rows[n].small[at + r + i]), values[i], added[n]);
      }
    }
  }
  for (int n = 0; n < N; ++n) {
    Store(sums + n * kBlockOut, Add(Load(sums + n * kBlockOut), added[n]));
  }
}

// Adds to sums [rows][16] of a block what the adapters of these rows, from `row` on, add. The sum over the rank has one
// order, so a row's bits do not depend on its neighbours. `column` is the block's first output.
__attribute__((noinline)) inline void AddAdapters(const LinearJob& job, int64_t column, int64_t row, int64_t rows,
                                                  float* sums) {
  const AdapterSizes& sizes = *job.adapter_sizes;
  int64_t part = 0;
  for (int64_t end = sizes.parts[0]; column >= end; end += sizes.parts[part]) {
    ++part;
  }
  const AdaptedRow* of_rows = job.adapted + row;
  for (int64_t r = 0; r < rows;) {
    const AdaptedRow* first = of_rows + r;
    if (!first->matrices) {
      ++r;
      continue;
    }
    int64_t count = 1;
    while (count < kAdaptedRows && r + count < rows && first[count].matrices == first->matrices) {
      ++count;
    }
    const uint16_t* b = BlockOfB(sizes, *first, column);
    float* to = sums + r * kBlockOut;
    if (count == kAdaptedRows) {
      AddProductsWithB<kAdaptedRows>(first, b, sizes.rank, part * sizes.rank, to);
    } else {
      count = 1;
      AddProductsWithB<1>(first, b, sizes.rank, part * sizes.rank, to);
    }
    r += count;
  }
}

}  // namespace
}  // namespace penstock
