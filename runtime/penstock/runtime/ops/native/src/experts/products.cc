#include "experts/products.h"

#include <algorithm>
#include <optional>

#include "common/buffers.h"
#include "common/carver.h"
#include "common/common.h"
#include "common/parallel.h"
#include "common/scratch.h"
#include "linear/format_of.h"

namespace penstock {
namespace {

namespace ffi = xla::ffi;

// With at most this many values of x one thread puts them in place faster than it gets help.
constexpr int64_t kFewValues = 1 << 15;

// Numbers the parts of all products: `first` holds the number of each product's first part, and at the end their sum.
struct Numbering {
  std::vector<int64_t> first{0};

  void Add(int64_t parts) { first.push_back(first.back() + parts); }
  int64_t All() const { return first.back(); }
  // The product that has this part.
  int64_t ProductOf(int64_t part) const {
    return std::upper_bound(first.begin(), first.end(), part) - first.begin() - 1;
  }
};

}  // namespace

PackedWeight PackedGroup::Part(int64_t index, int64_t block, int64_t count) const {
  const int64_t block_bytes = BytesOfBlock(format, k);
  const int64_t output = index * Outputs() + block * kBlockOut;
  return {tiles + (index * num_blocks + block) * block_bytes, scale ? scale + output : nullptr,
          bias ? bias + output : nullptr, count};
}

PackedGroup GroupOf(const ffi::AnyBuffer& tiles, const ffi::Buffer<ffi::F32>& scale, int64_t scale_at,
                    const ffi::Buffer<ffi::BF16>& bias, int64_t bias_at, int64_t k) {
  const auto shape = tiles.dimensions();
  const std::optional<Format> format = FormatOf(tiles, 1, k);
  return {static_cast<const char*>(tiles.untyped_data()),
          From<float>(scale, scale_at),
          From<uint16_t>(bias, bias_at),
          shape[0],
          shape[1],
          format ? k : -1,
          format.value_or(Format::kBf16)};
}

void Products::Add(const LinearJob& job, const LinearInput& input) {
  products_.push_back({job, input, nullptr, nullptr});
}

void Products::PutRows(ffi::ThreadPool& pool) {
  const auto carve = [&](Carver carver) {
    for (Product& product : products_) {
      const LinearJob& job = product.job;
      product.x = carver.Take<char>(kernel_.x_bytes(job.m, job.k, job.format));
      product.x_scale = carver.Take<float>(job.format == Format::kInt8 ? job.m : 0);
    }
    return carver.used();
  };
  carve(Carver(Scratch<struct ProductRows>(carve(Carver(nullptr)))));
  Numbering blocks;
  int64_t values = 0;
  for (const Product& product : products_) {
    blocks.Add(CeilDiv(product.job.m, kRowBlock));
    values += product.job.m * product.job.k;
  }
  const auto put = [&](int64_t number) {
    const int64_t index = blocks.ProductOf(number);
    const Product& product = products_[index];
    float* row = reinterpret_cast<float*>(Scratch<struct ProductRow>(product.job.k * 4));
    kernel_.put_rows(product.input, number - blocks.first[index], product.job, product.x, product.x_scale, row);
  };
  if (values <= kFewValues) {
    for (int64_t number = 0; number < blocks.All(); ++number) {
      put(number);
    }
    return;
  }
  ParallelFor(pool, blocks.All(), put);
}

void Products::Run(ffi::ThreadPool& pool) {
  PutRows(pool);
  Numbering units;
  for (Product& product : products_) {
    product.job.x = product.x;
    product.job.x_scale = product.x_scale;
    units.Add(kernel_.num_units(product.job));
  }
  ParallelFor(pool, units.All(), [&](int64_t number) {
    const int64_t index = units.ProductOf(number);
    kernel_.run_unit(products_[index].job, number - units.first[index]);
  });
}

}  // namespace penstock
