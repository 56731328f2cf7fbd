// The FFI operation `penstock_linear`: optionally the RMS norm of x, then products with one to three packed weights,
// then the epilogue.
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "common/buffers.h"
#include "common/common.h"
#include "common/cpu.h"
#include "common/guarded.h"
#include "common/huge_pages.h"
#include "common/parallel.h"
#include "common/scratch.h"
#include "linear/format_of.h"
#include "linear/linear.h"
#include "xla/ffi/api/ffi.h"

namespace penstock {

const LinearKernel* CurrentLinearKernel(Format format) {
  // On AMX the sums of codes would have to leave the tiles after each group, to be multiplied by its scales.
  const auto kernel = ForCurrentIsa(LinearAvx2, LinearAvx512, UsePairs() ? LinearAvx512Bf16 : LinearAvx512,
                                    IsCodes(format) ? LinearAvx512 : LinearAmx);
  return kernel ? &kernel() : nullptr;
}

namespace {

namespace ffi = xla::ffi;

// Divides a weight that holds the outputs of two weights of equal size, one after the other, into these two.
void Halve(LinearJob* job) {
  PackedWeight& first = job->weights[0];
  first.num_blocks /= 2;
  const int64_t outputs = first.num_blocks * kBlockOut;
  job->weights[1] = {first.tiles + first.num_blocks * job->BlockBytes(), first.scale ? first.scale + outputs : nullptr,
                     first.bias ? first.bias + outputs : nullptr, first.num_blocks};
  job->num_weights = 2;
}

// Gives each of the job's rows that has an adapter its matrices, and room for its products with A. Returns no rows if
// none has one; null if the operands do not fit together.
std::optional<std::vector<AdaptedRow>> FindAdapters(const LinearJob& job, const LinearInput& input,
                                                    const AdapterSizes& sizes, int64_t at, int64_t most,
                                                    ffi::RemainingArgs rest) {
  auto slots = rest.get<ffi::Buffer<ffi::S32>>(rest.size() - 2);
  auto pool = rest.get<ffi::Buffer<ffi::BF16>>(rest.size() - 1);
  if (!slots || !pool || static_cast<int64_t>(slots->element_count()) != most || pool->dimensions().size() != 2) {
    return std::nullopt;
  }
  int64_t outputs = 0;
  for (int64_t w = 0; w < job.num_weights; ++w) {
    outputs += job.weights[w].num_blocks * kBlockOut;
  }
  const int64_t num_slots = pool->dimensions()[0], of_slot = pool->dimensions()[1];
  if (!sizes.AreMultiples() || sizes.Outputs() != outputs || at < 0 || at + sizes.NumValues() > of_slot) {
    return std::nullopt;
  }
  const uint16_t* matrices = reinterpret_cast<const uint16_t*>(pool->untyped_data()) + at;
  float* small = reinterpret_cast<float*>(Scratch<struct AdapterSmall>(job.m * sizes.NumSmall() * 4));
  std::vector<AdaptedRow> rows;
  for (int64_t row = 0; row < job.m; ++row) {
    const int64_t slot = slots->typed_data()[row];
    if (slot > 0 && slot < num_slots) {
      rows.resize(job.m);
      rows[row] = {matrices + slot * of_slot, small + row * sizes.NumSmall(), &input, row};
    }
  }
  return rows;
}

// x bf16 [T, K]; num_rows int32 []: rows from this one on are padding, and are not written in y; norm bf16 [any] or
// [0]; residual and up bf16 like y or [0]; then weight, scale and bias for each weight, the latter two [0] if absent;
// and last, if rows may have adapters, the slot of each row, int32 [T], and the pool, bf16 [slots, any]. Rows of slot 0
// have none. Norm, scales and biases are parts of arrays that may hold many: `at` says where the norm begins, then
// where the scale and the bias of each weight do. `adapter` says the rank, where in a slot the layer's matrices begin,
// and the outputs of each part; see adapters.h.
ffi::Error Linear(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> x, ffi::Buffer<ffi::S32> num_rows,
                  ffi::Buffer<ffi::BF16> norm, ffi::Buffer<ffi::BF16> residual, ffi::Buffer<ffi::BF16> up,
                  ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y, int32_t activation, float limit, float eps,
                  float offset, float scale, float softcap, ffi::Span<const int64_t> at,
                  ffi::Span<const int64_t> adapter) {
  LinearJob job{};
  const int64_t most = x.dimensions()[0];
  job.m = std::min<int64_t>(num_rows.typed_data()[0], most);
  job.k = x.dimensions()[1];
  if (activation != 0 && !IsGated(activation)) {
    return ffi::Error::InvalidArgument("no activation has this number");
  }
  job.activation = static_cast<Activation>(activation);
  job.limit = limit;
  job.scale = scale;
  job.softcap = softcap;
  job.up = From<uint16_t>(up, 0);
  job.num_weights = static_cast<int64_t>(rest.size()) / 3;
  if (rest.size() % 3 == 1 || (rest.size() % 3 == 2) != (adapter.size() > 2)) {
    return ffi::Error::InvalidArgument("each weight has three operands, and adapters have two");
  }
  if (job.num_weights < 1 || job.num_weights > kMaxWeights) {
    return ffi::Error::InvalidArgument("1 to 3 weights");
  }
  if (static_cast<int64_t>(at.size()) != 1 + 2 * job.num_weights) {
    return ffi::Error::InvalidArgument("`at` is short");
  }
  for (int64_t w = 0; w < job.num_weights; ++w) {
    auto tiles = rest.get<ffi::AnyBuffer>(3 * w), scale = rest.get<ffi::AnyBuffer>(3 * w + 1),
         bias = rest.get<ffi::AnyBuffer>(3 * w + 2);
    if (!tiles || !scale || !bias) {
      return ffi::Error::InvalidArgument("weights, scales and biases are buffers");
    }
    const std::optional<Format> format = FormatOf(*tiles, 0, job.k);
    if (!format || (w > 0 && *format != job.format)) {
      return ffi::Error::InvalidArgument("x and a weight differ in their inner size, or two weights in their format");
    }
    job.format = *format;
    job.weights[w] = {static_cast<const char*>(tiles->untyped_data()), From<float>(*scale, at[1 + 2 * w]),
                      From<uint16_t>(*bias, at[2 + 2 * w]), tiles->dimensions()[0]};
  }
  const LinearKernel* kernel = CurrentLinearKernel(job.format);
  if (!kernel) {
    return ffi::Error::Internal("no kernel for this processor");
  }
  if (job.gated() && job.num_weights == 1) {
    Halve(&job);
  }
  job.ldy = y->dimensions()[1];
  if (y->element_type() == ffi::F32) {
    job.y_f32 = static_cast<float*>(y->untyped_data());
  } else {
    job.y_bf16 = static_cast<uint16_t*>(y->untyped_data());
  }
  job.residual = From<uint16_t>(residual, 0);
  if (job.gated() && !job.y_bf16) {
    return ffi::Error::InvalidArgument("the results of a gated layer are bf16");
  }
  if (job.m <= 0) {
    return ffi::Error::Success();
  }
  if (y->size_bytes() >= kAlwaysFresh) {
    // The system clears each page of fresh memory when it is first written: the logits of 64 rows and 152,000 tokens
    // lie on 9,500 pages of 4 KiB, or on 19 huge ones. Memory that malloc keeps is not marked for what it may hold
    // later.
    WantHugePages(y->untyped_data(), y->size_bytes() / most * job.m);
  }

  const int64_t x_bytes = RoundUp(kernel->x_bytes(job.m, job.k, job.format), kCacheLine);
  char* scratch = Scratch<struct LinearRows>(x_bytes + job.m * 4);
  float* x_scale = reinterpret_cast<float*>(scratch + x_bytes);
  const LinearInput input{reinterpret_cast<const uint16_t*>(x.untyped_data()),
                          job.k,
                          From<uint16_t>(norm, at[0]),
                          eps,
                          nullptr,
                          nullptr,
                          offset};
  auto prepare = [&](int64_t block) {
    float* row = reinterpret_cast<float*>(Scratch<struct LinearRow>(job.k * 4));
    kernel->put_rows(input, block, job, scratch, x_scale, row);
  };
  AdapterSizes sizes{};
  std::vector<AdaptedRow> adapted;
  if (adapter.size() > 2) {
    sizes = {job.k, adapter[0], {adapter.begin() + 2, adapter.end()}};
    std::optional<std::vector<AdaptedRow>> found = FindAdapters(job, input, sizes, adapter[1], most, rest);
    if (!found) {
      return ffi::Error::InvalidArgument("adapters that do not fit the layer, or whose sizes are no multiples of 16");
    }
    adapted = std::move(*found);
  }
  const int64_t row_blocks = CeilDiv(job.m, kRowBlock);
  if (!adapted.empty()) {
    const ProductsWithA products(sizes, adapted, NumThreads(pool));
    ParallelFor(pool, row_blocks + products.num_units(),
                [&](int64_t i) { i < row_blocks ? prepare(i) : products.RunUnit(i - row_blocks); });
    job.adapted = adapted.data();
    job.adapter_sizes = &sizes;
  } else if (row_blocks == 1) {
    prepare(0);
  } else {
    ParallelFor(pool, row_blocks, prepare);
  }
  job.x = scratch;
  job.x_scale = x_scale;
  ParallelFor(pool, kernel->num_units(job), [&](int64_t unit) { kernel->run_unit(job, unit); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace penstock

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* penstock_linear(XLA_FFI_CallFrame* frame) {
  using namespace penstock;
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<ffi::Buffer<ffi::BF16>>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .Arg<ffi::Buffer<ffi::BF16>>()
                             .Arg<ffi::Buffer<ffi::BF16>>()
                             .Arg<ffi::Buffer<ffi::BF16>>()
                             .RemainingArgs()
                             .Ret<ffi::AnyBuffer>()
                             .Attr<int32_t>("activation")
                             .Attr<float>("limit")
                             .Attr<float>("eps")
                             .Attr<float>("offset")
                             .Attr<float>("scale")
                             .Attr<float>("softcap")
                             .Attr<ffi::Span<const int64_t>>("at")
                             .Attr<ffi::Span<const int64_t>>("adapter")
                             .To(Guarded<&Linear>::Call)
                             .release();
  return handler->Call(frame);
}
