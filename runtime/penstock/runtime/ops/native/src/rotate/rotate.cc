// The FFI operation `penstock_rotate`: see rotate.h.
#include "rotate/rotate.h"

#include "common/buffers.h"
#include "common/cpu.h"
#include "common/guarded.h"
#include "common/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace penstock {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kRowsPerCall = 8;

RotateRows Kernel() {
  return ForCurrentIsa(RotateRowsAvx2, RotateRowsAvx512, RotateRowsAvx512Bf16, RotateRowsAvx512Bf16);
}

uint16_t* Bits(ffi::Result<ffi::Buffer<ffi::BF16>>& buffer) {
  return reinterpret_cast<uint16_t*>(buffer->untyped_data());
}

// qkv bf16 [T, (H + 2 K) * D], or [T, (H + K) * D] if values are keys; cos and sin float32 [T, R / 2]; num_rows int32
// []: rows from this one on are padding, and are not written; norms bf16 [D], or with all heads together [H * D] and
// [K * D], from `q_norm_at` and `k_norm_at` on in arrays that may hold more, or [0]; q_scale float32 [T] or [0].
// Returns q [T, H, D], k [T, K, D] and v [T, K, D]. K may be 0.
ffi::Error Rotate(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> qkv, ffi::Buffer<ffi::F32> cos,
                  ffi::Buffer<ffi::F32> sin, ffi::Buffer<ffi::S32> num_rows, ffi::Buffer<ffi::BF16> q_norm,
                  ffi::Buffer<ffi::BF16> k_norm, ffi::Buffer<ffi::F32> q_scale, ffi::Result<ffi::Buffer<ffi::BF16>> q,
                  ffi::Result<ffi::Buffer<ffi::BF16>> k, ffi::Result<ffi::Buffer<ffi::BF16>> v, float eps, float offset,
                  int32_t norms, bool v_norm, bool values_are_keys, int64_t q_norm_at, int64_t k_norm_at) {
  const RotateRows kernel = Kernel();
  if (!kernel) {
    return ffi::Error::Internal("no kernel for this processor");
  }
  RotateJob job{};
  job.qkv = reinterpret_cast<const uint16_t*>(qkv.untyped_data());
  job.cos = cos.typed_data();
  job.sin = sin.typed_data();
  job.rotary = 2 * cos.dimensions()[1];
  job.q_norm = From<uint16_t>(q_norm, q_norm_at);
  job.k_norm = From<uint16_t>(k_norm, k_norm_at);
  job.q_scale = From<float>(q_scale, 0);
  job.norms = static_cast<HeadNorms>(norms);
  job.eps = eps;
  job.offset = offset;
  job.v_norm = v_norm;
  job.values_are_keys = values_are_keys;
  job.heads = q->dimensions()[1];
  job.kv_heads = k->dimensions()[1];
  job.dim = q->dimensions()[2];
  if (job.dim % 32 != 0 || job.rotary % 32 != 0 || job.rotary > job.dim) {
    return ffi::Error::InvalidArgument("the sizes of a head and of its rotated part must be multiples of 32");
  }
  if (qkv.dimensions()[1] != (job.heads + (values_are_keys ? 1 : 2) * job.kv_heads) * job.dim) {
    return ffi::Error::InvalidArgument("qkv must have the channels of all heads");
  }
  job.q = Bits(q);
  job.k = Bits(k);
  job.v = Bits(v);
  const int64_t rows = std::min<int64_t>(num_rows.typed_data()[0], q->dimensions()[0]);
  ParallelFor(pool, (rows + kRowsPerCall - 1) / kRowsPerCall,
              [&](int64_t i) { kernel(job, i * kRowsPerCall, std::min(rows, (i + 1) * kRowsPerCall)); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace penstock

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* penstock_rotate(XLA_FFI_CallFrame* frame) {
  using namespace penstock;
  using Bf16 = ffi::Buffer<ffi::BF16>;
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<Bf16>()
                             .Arg<ffi::Buffer<ffi::F32>>()
                             .Arg<ffi::Buffer<ffi::F32>>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .Arg<Bf16>()
                             .Arg<Bf16>()
                             .Arg<ffi::Buffer<ffi::F32>>()
                             .Ret<Bf16>()
                             .Ret<Bf16>()
                             .Ret<Bf16>()
                             .Attr<float>("eps")
                             .Attr<float>("offset")
                             .Attr<int32_t>("norms")
                             .Attr<bool>("v_norm")
                             .Attr<bool>("values_are_keys")
                             .Attr<int64_t>("q_norm_at")
                             .Attr<int64_t>("k_norm_at")
                             .To(Guarded<&Rotate>::Call)
                             .release();
  return handler->Call(frame);
}
