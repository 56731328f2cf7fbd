// The FFI operation `penstock_norm`: see norm.h.
#include "norm/norm.h"

#include "common/buffers.h"
#include "common/common.h"
#include "common/cpu.h"
#include "common/guarded.h"
#include "common/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace penstock {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kChannelsPerCall = 16 * 1024;  // some microseconds

NormRows Kernel() { return ForCurrentIsa(NormRowsAvx2, NormRowsAvx512, NormRowsAvx512Bf16, NormRowsAvx512Bf16); }

// x bf16 [T, ...]; num_rows int32 []: rows from this one on are padding, and are not written; norm bf16 [size], from
// `norm_at` on in an array that may hold more, or [0]; bias likewise; residual bf16 like x or [0]; factor float32 [1],
// at `factor_at` in an array that may hold more, or [0]. Returns y like x.
ffi::Error Norm(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> x, ffi::Buffer<ffi::S32> num_rows,
                ffi::Buffer<ffi::BF16> norm, ffi::Buffer<ffi::BF16> bias, ffi::Buffer<ffi::BF16> residual,
                ffi::Buffer<ffi::F32> factor, ffi::Result<ffi::Buffer<ffi::BF16>> y, bool normed, bool centred,
                int32_t plain, float eps, float offset, float scale, int64_t size, int64_t norm_at, int64_t bias_at,
                int64_t factor_at) {
  const NormRows kernel = Kernel();
  if (!kernel) {
    return ffi::Error::Internal("no kernel for this processor");
  }
  const int64_t most = x.dimensions()[0];
  const int64_t rows = Min<int64_t>(num_rows.typed_data()[0], most);
  if (rows <= 0) {
    return ffi::Error::Success();
  }
  NormJob job{};
  job.x = From<uint16_t>(x, 0);
  job.norm = From<uint16_t>(norm, norm_at);
  job.bias = From<uint16_t>(bias, bias_at);
  job.residual = From<uint16_t>(residual, 0);
  job.y = reinterpret_cast<uint16_t*>(y->untyped_data());
  job.channels = static_cast<int64_t>(x.element_count()) / most;
  job.size = size;
  job.normed = normed;
  job.centred = centred;
  job.plain = static_cast<Plain>(plain);
  job.eps = eps;
  job.offset = offset;
  job.scale = scale;
  const float* factors = From<float>(factor, factor_at);
  job.factor = factors ? *factors : 1.0f;
  if (size <= 0 || size % 16 != 0 || job.channels % size != 0) {
    return ffi::Error::InvalidArgument("a run must be a multiple of 16 channels, and a row of whole runs");
  }
  const int64_t per_call = Max<int64_t>(1, kChannelsPerCall / Max<int64_t>(1, job.channels));
  ParallelFor(pool, CeilDiv(rows, per_call),
              [&](int64_t i) { kernel(job, i * per_call, Min(rows, (i + 1) * per_call)); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace penstock

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* penstock_norm(XLA_FFI_CallFrame* frame) {
  using namespace penstock;
  using Bf16 = ffi::Buffer<ffi::BF16>;
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<Bf16>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .Arg<Bf16>()
                             .Arg<Bf16>()
                             .Arg<Bf16>()
                             .Arg<ffi::Buffer<ffi::F32>>()
                             .Ret<Bf16>()
                             .Attr<bool>("normed")
                             .Attr<bool>("centred")
                             .Attr<int32_t>("plain")
                             .Attr<float>("eps")
                             .Attr<float>("offset")
                             .Attr<float>("scale")
                             .Attr<int64_t>("size")
                             .Attr<int64_t>("norm_at")
                             .Attr<int64_t>("bias_at")
                             .Attr<int64_t>("factor_at")
                             .To(Guarded<&Norm>::Call)
                             .release();
  return handler->Call(frame);
}
