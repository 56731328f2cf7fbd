// Many products with packed weights in two loops over the pool, however few rows each of them has.
#pragma once

#include <cstdint>
#include <vector>

#include "linear/linear.h"
#include "xla/ffi/api/ffi.h"

namespace penstock {

// The weights of several products of equal shape, one behind the other: of all experts of a layer, or of all heads.
struct PackedGroup {
  const char* tiles;              // see linear.h, for each product
  const float* scale;             // kInt8: [number, out]; else null
  const uint16_t* bias;           // bf16 [number, out] or null
  int64_t number, num_blocks, k;  // k: -1 if the tiles are not of the inner size that was asked for
  Format format;

  int64_t Outputs() const { return num_blocks * kBlockOut; }
  // `count` out blocks of the weight of product `index`, from `block` on.
  PackedWeight Part(int64_t index, int64_t block, int64_t count) const;
};

// Reads the operands of a group with k inputs: tiles, scale float32 [any] or [0], bias bf16 [any] or [0]. The
// group's scales begin at column `scale_at`, its biases at `bias_at`.
PackedGroup GroupOf(const xla::ffi::AnyBuffer& tiles, const xla::ffi::Buffer<xla::ffi::F32>& scale, int64_t scale_at,
                    const xla::ffi::Buffer<xla::ffi::BF16>& bias, int64_t bias_at, int64_t k);

// Products that do not need each other's results.
class Products {
 public:
  explicit Products(const LinearKernel& kernel) : kernel_(kernel) {}

  // `job` is as LinearKernel wants it, without x and x_scale.
  void Add(const LinearJob& job, const LinearInput& input);

  // Computes all of them. Work is shared by units of weights, so few rows are spread as evenly as many, and the weights
  // of a product are read once for as many of its rows as the cache holds. Throws std::bad_alloc.
  void Run(xla::ffi::ThreadPool& pool);

 private:
  struct Product {
    LinearJob job;
    LinearInput input;
    char* x;
    float* x_scale;
  };

  void PutRows(xla::ffi::ThreadPool& pool);

  const LinearKernel& kernel_;
  std::vector<Product> products_;
};

}  // namespace penstock
