// The FFI operation `penstock_conv`: see state.h.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "common/buffers.h"
#include "common/common.h"
#include "common/guarded.h"
#include "common/parallel.h"
#include "common/scratch.h"
#include "state/operands.h"
#include "xla/ffi/api/ffi.h"

namespace penstock {
namespace {

namespace ffi = xla::ffi;

struct Zeros;

constexpr int64_t kTokensPerCall = 8;
constexpr int64_t kChannelsPerCall = 2048;

// x [T, C], bf16 or float32; weight [K, C] and bias [C] or [0], both bf16 or both float32; state float32 [S, K - 1, C],
// updated in place; the rows as MakeRows takes them, where cut and cut_to may be [0]. Returns y [T, C], like x, which
// is 0 from the last row's end on.
ffi::Error Convolution(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer bias,
                       ffi::Buffer<ffi::F32> state_in, ffi::Buffer<ffi::S32> q_lens, ffi::Buffer<ffi::S32> from,
                       ffi::Buffer<ffi::S32> to, ffi::Buffer<ffi::S32> cut, ffi::Buffer<ffi::S32> cut_to,
                       ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::Buffer<ffi::F32>> state, bool silu) {
  const StateKernels* kernels = CurrentStateKernels();
  if (!kernels) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented, "no kernel for this processor");
  }
  if (state->untyped_data() != state_in.untyped_data()) {
    return ffi::Error::Internal("the state must be updated in place");
  }
  std::vector<StateRow> rows;
  const int64_t tokens = x.dimensions()[0];
  const std::string problem = MakeRows(OperandsOf(q_lens, from, to, cut, cut_to, tokens, state->dimensions()[0]), rows);
  if (!problem.empty()) {
    return ffi::Error::InvalidArgument("convolution: " + problem);
  }
  ConvJob job{};
  job.x = From<char>(x, 0);
  job.weight = From<char>(weight, 0);
  job.bias = From<char>(bias, 0);
  job.state = state->typed_data();
  job.y = static_cast<char*>(y->untyped_data());
  job.channels = x.dimensions()[1];
  job.taps = weight.dimensions()[0];
  job.bf16 = x.element_type() == ffi::BF16;
  job.bf16_weights = weight.element_type() == ffi::BF16;
  job.silu = silu;
  if (job.channels % 16 != 0 || job.taps < 2 || job.taps > kMostTaps) {
    return ffi::Error::InvalidArgument("convolution: channels must be a multiple of 16, and there are 2 to 8 taps");
  }
  const int64_t bytes = job.channels * (job.bf16 ? 2 : 4), used = NumTokens(rows);
  memset(job.y + used * bytes, 0, (tokens - used) * bytes);
  auto* zeros = reinterpret_cast<float*>(Scratch<Zeros>(job.channels * 4));
  std::fill_n(zeros, job.channels, 0.0f);
  job.zeros = zeros;

  const int64_t parts = CeilDiv(job.channels, kChannelsPerCall);
  ParallelFor(pool, CeilDiv(used, kTokensPerCall) * parts, [&](int64_t call) {
    const int64_t begin = call / parts * kTokensPerCall, end = Min(used, begin + kTokensPerCall);
    const int64_t low = call % parts * kChannelsPerCall, high = Min(job.channels, low + kChannelsPerCall);
    auto row = std::upper_bound(rows.begin(), rows.end(), begin,
                                [](int64_t token, const StateRow& one) { return token < one.first; }) -
               1;
    for (; row != rows.end() && row->first < end; ++row) {
      kernels->conv(job, *row, Max<int64_t>(begin - row->first, 0), Min(end - row->first, row->count), low, high);
    }
  });
  ParallelFor(pool, static_cast<int64_t>(rows.size()) * parts, [&](int64_t call) {
    const int64_t low = call % parts * kChannelsPerCall;
    kernels->keep(job, rows[call / parts], low, Min(job.channels, low + kChannelsPerCall));
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace penstock

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* penstock_conv(XLA_FFI_CallFrame* frame) {
  using namespace penstock;
  using Numbers = ffi::Buffer<ffi::S32>;
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::Buffer<ffi::F32>>()
                             .Arg<Numbers>()
                             .Arg<Numbers>()
                             .Arg<Numbers>()
                             .Arg<Numbers>()
                             .Arg<Numbers>()
                             .Ret<ffi::AnyBuffer>()
                             .Ret<ffi::Buffer<ffi::F32>>()
                             .Attr<bool>("silu")
                             .To(Guarded<&Convolution>::Call)
                             .release();
  return handler->Call(frame);
}
