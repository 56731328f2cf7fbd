// The FFI operation `penstock_linear`: optionally the RMS norm of x, then products with one to three packed weights,
// which may differ in their formats, then the epilogue.
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

// Neighbouring weights of one format, and room for x in the form in which they are multiplied.
struct Part {
  LinearJob job;
  const LinearKernel* kernel;
  char* x;
  float* x_scale;
  int64_t num_units;
};

// Gives each of m rows that has an adapter its matrices, and room for its products with A. `outputs` are those of all
// weights. Returns no rows if none has one; null if the operands do not fit together.
std::optional<std::vector<AdaptedRow>> FindAdapters(int64_t m, int64_t outputs, const LinearInput& input,
                                                    const AdapterSizes& sizes, int64_t at, int64_t most,
                                                    ffi::RemainingArgs rest) {
  auto slots = rest.get<ffi::Buffer<ffi::S32>>(rest.size() - 2);
  auto pool = rest.get<ffi::Buffer<ffi::BF16>>(rest.size() - 1);
  if (!slots || !pool || static_cast<int64_t>(slots->element_count()) != most || pool->dimensions().size() != 2) {
    return std::nullopt;
  }
  const int64_t num_slots = pool->dimensions()[0], of_slot = pool->dimensions()[1];
  if (!sizes.AreMultiples() || sizes.Outputs() != outputs || at < 0 || at + sizes.NumValues() > of_slot) {
    return std::nullopt;
  }
  const uint16_t* matrices = reinterpret_cast<const uint16_t*>(pool->untyped_data()) + at;
  float* small = reinterpret_cast<float*>(Scratch<struct AdapterSmall>(m * sizes.NumSmall() * 4));
  std::vector<AdaptedRow> rows;
  for (int64_t row = 0; row < m; ++row) {
    const int64_t slot = slots->typed_data()[row];
    if (slot > 0 && slot < num_slots) {
      rows.resize(m);
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
  const int64_t num_weights = static_cast<int64_t>(rest.size()) / 3;
  if (rest.size() % 3 == 1 || (rest.size() % 3 == 2) != (adapter.size() > 2)) {
    return ffi::Error::InvalidArgument("each weight has three operands, and adapters have two");
  }
  if (num_weights < 1 || num_weights > kMaxWeights) {
    return ffi::Error::InvalidArgument("1 to 3 weights");
  }
  if (static_cast<int64_t>(at.size()) != 1 + 2 * num_weights) {
    return ffi::Error::InvalidArgument("`at` is short");
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
  Part parts[kMaxWeights] = {};
  int64_t num_parts = 0, num_blocks = 0;
  for (int64_t w = 0; w < num_weights; ++w) {
    auto tiles = rest.get<ffi::AnyBuffer>(3 * w), scale = rest.get<ffi::AnyBuffer>(3 * w + 1),
         bias = rest.get<ffi::AnyBuffer>(3 * w + 2);
    if (!tiles || !scale || !bias) {
      return ffi::Error::InvalidArgument("weights, scales and biases are buffers");
    }
    const std::optional<Format> format = FormatOf(*tiles, 0, job.k);
    if (!format) {
      return ffi::Error::InvalidArgument("x and a weight differ in their inner size");
    }
    if (w == 0 || *format != parts[num_parts - 1].job.format) {
      job.format = *format;
      job.first_block = num_blocks;
      parts[num_parts++] = {job, CurrentLinearKernel(*format), nullptr, nullptr, 0};
    }
    LinearJob& part = parts[num_parts - 1].job;
    part.weights[part.num_weights++] = {static_cast<const char*>(tiles->untyped_data()),
                                        From<float>(*scale, at[1 + 2 * w]), From<uint16_t>(*bias, at[2 + 2 * w]),
                                        tiles->dimensions()[0]};
    num_blocks += tiles->dimensions()[0];
  }
  if (!parts[0].kernel) {
    return ffi::Error::Internal("no kernel for this processor");
  }
  if (job.gated() && num_parts > 1) {
    return ffi::Error::InvalidArgument("the two weights of a gated layer differ in their format");
  }
  if (job.gated() && num_weights == 1) {
    Halve(&parts[0].job);
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

  const int64_t scale_bytes = RoundUp(job.m * 4, kCacheLine);
  int64_t bytes = 0;
  for (int64_t p = 0; p < num_parts; ++p) {
    bytes += RoundUp(parts[p].kernel->x_bytes(job.m, job.k, parts[p].job.format), kCacheLine) + scale_bytes;
  }
  char* scratch = Scratch<struct LinearRows>(bytes);
  for (int64_t p = 0; p < num_parts; ++p) {
    Part& part = parts[p];
    part.x = scratch;
    scratch += RoundUp(part.kernel->x_bytes(job.m, job.k, part.job.format), kCacheLine);
    part.x_scale = reinterpret_cast<float*>(scratch);
    scratch += scale_bytes;
  }
  const LinearInput input{reinterpret_cast<const uint16_t*>(x.untyped_data()),
                          job.k,
                          From<uint16_t>(norm, at[0]),
                          eps,
                          nullptr,
                          nullptr,
                          offset};
  auto prepare = [&](int64_t block) {
    float* row = reinterpret_cast<float*>(Scratch<struct LinearRow>(job.k * 4));
    for (int64_t p = 0; p < num_parts; ++p) {
      parts[p].kernel->put_rows(input, block, parts[p].job, parts[p].x, parts[p].x_scale, row);
    }
  };
  AdapterSizes sizes{};
  std::vector<AdaptedRow> adapted;
  if (adapter.size() > 2) {
    sizes = {job.k, adapter[0], {adapter.begin() + 2, adapter.end()}};
    std::optional<std::vector<AdaptedRow>> found =
        FindAdapters(job.m, num_blocks * kBlockOut, input, sizes, adapter[1], most, rest);
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
  } else if (row_blocks == 1) {
    prepare(0);
  } else {
    ParallelFor(pool, row_blocks, prepare);
  }
  int64_t num_units = 0;
  for (int64_t p = 0; p < num_parts; ++p) {
    Part& part = parts[p];
    part.job.x = part.x;
    part.job.x_scale = part.x_scale;
    if (!adapted.empty()) {
      part.job.adapted = adapted.data();
      part.job.adapter_sizes = &sizes;
    }
    part.num_units = part.kernel->num_units(part.job);
    num_units += part.num_units;
  }
  ParallelFor(pool, num_units, [&](int64_t unit) {
    const Part* part = parts;
    for (; unit >= part->num_units; ++part) {
      unit -= part->num_units;
    }
    part->kernel->run_unit(part->job, unit);
  });
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
