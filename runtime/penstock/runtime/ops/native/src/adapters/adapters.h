// What LoRA adapters add to the products of a linear layer: (x A) B for each row, with matrices of the row's adapter.
// The products with A are made here, before those of the layer. A kernel of the layer adds the products with B to its
// sums while they are in the cache (linear/linear_adapted.h).
#pragma once

#include <cstdint>
#include <vector>

namespace penstock {

struct LinearInput;

// Rows with the same matrices that share what is read of A. Their sums fill the registers.
constexpr int64_t kRowsTogether = 8;

// From one row of x as float32 to the next. Without the line between them, rows of a power of two inputs would have
// their values in the same few places of the first-level cache.
constexpr int64_t WideStride(int64_t k) { return k + 16; }

// The sizes of a layer. Its matrices lie one behind the other: A of each part, bf16 [k / 2, rank, 2], then B of each
// part, bf16 [outputs / 16, rank / 2, 16, 2]. So the products with 16 outputs read neighbours, and two bf16 that lie in
// the halves of a word become float32 by one instruction each.
struct AdapterSizes {
  int64_t k, rank;
  std::vector<int64_t> parts;  // numbers of outputs, which lie side by side in y

  int64_t Outputs() const;
  int64_t NumValues() const;  // of all matrices
  int64_t NumSmall() const { return static_cast<int64_t>(parts.size()) * rank; }
  bool AreMultiples() const;
};

// A row of a product.
struct AdaptedRow {
  const uint16_t* matrices;  // of the layer; null: the row has no adapter
  float* small;              // float32 [NumSmall]: x A, where x is rounded to bf16
  const LinearInput* input;
  int64_t number;  // of the row in the input
};

// Some rows with the same matrices and the same input.
struct AdaptedGroup {
  const AdaptedRow* rows;
  int64_t count;  // 1 to kRowsTogether
};

// Makes small of the parts [first, last). `wide` has room for kRowsTogether * WideStride(k) floats. All sums have one
// order, whatever `count` is: there are two, of the inputs with even and with odd numbers, which are added last.
using TimesA = void(const AdaptedGroup&, int64_t k, int64_t rank, int64_t first, int64_t last, float* wide);

TimesA TimesAAvx2;
TimesA TimesAAvx512;

// The products with A of any mix of rows, divided into units of work.
class ProductsWithA {
 public:
  // Takes the rows that have an adapter. `sizes` must outlive it.
  ProductsWithA(const AdapterSizes& sizes, const std::vector<AdaptedRow>& rows, int64_t num_threads);
  ProductsWithA(const ProductsWithA&) = delete;  // groups_ points into rows_

  int64_t num_units() const { return static_cast<int64_t>(groups_.size()) * units_of_group_; }
  // Throws std::bad_alloc.
  void RunUnit(int64_t unit) const;

 private:
  const AdapterSizes& sizes_;
  TimesA* times_a_;
  std::vector<AdaptedRow> rows_;  // sorted by their matrices
  std::vector<AdaptedGroup> groups_;
  int64_t units_of_group_;
};

}  // namespace penstock
