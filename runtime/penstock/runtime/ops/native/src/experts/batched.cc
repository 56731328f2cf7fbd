// The FFI operation `penstock_batched`: for each head a product of its own, such as latent attention's projections.
#include <algorithm>

#include "common/common.h"
#include "common/guarded.h"
#include "experts/products.h"
#include "xla/ffi/api/ffi.h"

namespace penstock {
namespace {

namespace ffi = xla::ffi;

// What the rows of a pass may take in the kernel's form.
constexpr int64_t kPassBytes = 64 << 20;

// x bf16 [T, G, K]; num_rows int32 []: rows from this one on are padding, and are not written in y; tiles, scale and
// bias of G weights [N, K], which begin at `scale_at` and `bias_at` of arrays that may hold more.
ffi::Error Batched(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> x, ffi::Buffer<ffi::S32> num_rows, ffi::AnyBuffer tiles,
                   ffi::Buffer<ffi::F32> scale, ffi::Buffer<ffi::BF16> bias, ffi::Result<ffi::Buffer<ffi::BF16>> y,
                   int64_t scale_at, int64_t bias_at) {
  const PackedGroup group = GroupOf(tiles, scale, scale_at, bias, bias_at, x.dimensions()[2]);
  const LinearKernel* kernel = CurrentLinearKernel(group.format);
  if (!kernel) {
    return ffi::Error::Internal("no kernel for this processor");
  }
  const auto shape = x.dimensions();
  if (shape[1] != group.number || shape[2] != group.k || y->dimensions()[2] != group.Outputs()) {
    return ffi::Error::InvalidArgument("x, the weights and the result do not fit together");
  }
  const int64_t stride = group.number * group.k, ldy = group.number * group.Outputs();
  const int64_t rows = std::min<int64_t>(num_rows.typed_data()[0], shape[0]);
  const int64_t row_bytes = std::max<int64_t>(1, group.number * kernel->x_bytes(1, group.k, group.format));
  const int64_t rows_in_pass = std::max<int64_t>(1, kPassBytes / row_bytes);
  const int64_t passes = rows > 0 ? CeilDiv(rows, rows_in_pass) : 0;
  for (int64_t pass = 0; pass < passes; ++pass) {  // of equal sizes
    const int64_t first = pass * rows / passes, last = (pass + 1) * rows / passes;
    Products products(*kernel);
    for (int64_t g = 0; g < group.number; ++g) {
      LinearJob job{};
      job.m = last - first;
      job.k = group.k;
      job.format = group.format;
      job.weights[0] = group.Part(g, 0, group.num_blocks);
      job.num_weights = 1;
      job.y_bf16 = reinterpret_cast<uint16_t*>(y->untyped_data()) + first * ldy + g * group.Outputs();
      job.ldy = ldy;
      LinearInput input{};
      input.x = reinterpret_cast<const uint16_t*>(x.untyped_data()) + first * stride + g * group.k;
      input.stride = stride;
      products.Add(job, input);
    }
    products.Run(pool);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace penstock

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* penstock_batched(XLA_FFI_CallFrame* frame) {
  using namespace penstock;
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<ffi::Buffer<ffi::BF16>>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::Buffer<ffi::F32>>()
                             .Arg<ffi::Buffer<ffi::BF16>>()
                             .Ret<ffi::Buffer<ffi::BF16>>()
                             .Attr<int64_t>("scale_at")
                             .Attr<int64_t>("bias_at")
                             .To(Guarded<&Batched>::Call)
                             .release();
  return handler->Call(frame);
}
