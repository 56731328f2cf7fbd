// The FFI operation `penstock_float32`: see float32.h.
#include "float32/float32.h"

#include "common/buffers.h"
#include "common/common.h"
#include "common/cpu.h"
#include "common/guarded.h"
#include "common/parallel.h"
#include "common/scratch.h"
#include "xla/ffi/api/ffi.h"

namespace penstock {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kRowsAtOnce = 96;           // of x: with 1,536 inputs they take a quarter of the second-level cache
constexpr int64_t kUnitsOfThread = 4;         // so that threads that are disturbed are helped
constexpr int64_t kUnitProducts = 1 << 19;    // of a unit at least: some 10 us
constexpr int64_t kNumbersPerCall = 1 << 15;  // of the norm

// x float32 [T, K]; num_rows int32 []: rows from this one on are padding, and are not written; tiles float32
// [N / 16, any], which hold a packed weight; vectors float32 [any], in which bias, norm and norm_bias are the N values
// from these places on, or are absent where a place is negative; residual float32 [T, N] or [0]. The results are
// float32 [T, n], of which the n add up to N.
ffi::Error Float32(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> num_rows,
                   ffi::Buffer<ffi::F32> tiles, ffi::Buffer<ffi::F32> vectors, ffi::Buffer<ffi::F32> residual,
                   ffi::RemainingRets results, int32_t plain, bool normed, float eps, float offset, int64_t bias,
                   int64_t norm, int64_t norm_bias) {
  const auto found = ForCurrentIsa(Float32Avx2, Float32Avx512, Float32Avx512, Float32Amx);
  if (!found) {
    return ffi::Error::Internal("no kernel for this processor");
  }
  const Float32Kernel& kernel = found();
  if (x.dimensions().size() != 2 || results.empty() || results.size() > kMostParts) {
    return ffi::Error::InvalidArgument("x is a matrix, and the outputs are no more arrays than there may be");
  }
  const int64_t most = x.dimensions()[0], k = x.dimensions()[1];
  const auto sizes = [](const auto& buffer) { return static_cast<int64_t>(buffer.element_count()); };
  Float32Job job{};
  int64_t n = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::Buffer<ffi::F32>>(i);
    if (!result.has_value() || (*result)->dimensions().size() != 2 || (*result)->dimensions()[0] != most) {
      return ffi::Error::InvalidArgument("each output is a float32 matrix with the rows of x");
    }
    job.parts[i] = Float32Part{(*result)->typed_data(), n, (*result)->dimensions()[1]};
    if (job.parts[i].n % 16 != 0) {
      return ffi::Error::InvalidArgument("outputs are multiples of 16");
    }
    n += job.parts[i].n;
  }
  if (k % 16 != 0 || sizes(tiles) != n * k) {
    return ffi::Error::InvalidArgument("inputs are multiples of 16, and the weight has all of them and all outputs");
  }
  if (results.size() > 1 && (normed || sizes(residual) != 0)) {
    return ffi::Error::InvalidArgument("outputs in several arrays have neither a residual nor a norm");
  }
  if (sizes(residual) != 0 && sizes(residual) != most * n) {
    return ffi::Error::InvalidArgument("the residual is like y");
  }
  for (int64_t place : {bias, norm, norm_bias}) {
    if (place >= 0 && place + n > sizes(vectors)) {
      return ffi::Error::InvalidArgument("a bias or a norm lies behind the vectors");
    }
  }
  const auto vector_at = [&](int64_t place) { return place < 0 ? nullptr : From<float>(vectors, place); };
  job.x = x.typed_data();
  job.weight = tiles.typed_data();
  job.bias = vector_at(bias);
  job.residual = From<float>(residual, 0);
  job.k = k;
  job.n = n;
  job.plain = static_cast<Plain>(plain);
  job.normed = normed;
  job.norm = vector_at(norm);
  job.norm_bias = vector_at(norm_bias);
  job.eps = eps;
  job.offset = offset;
  const int64_t rows = Min<int64_t>(num_rows.typed_data()[0], most);
  if (rows <= 0 || n == 0) {
    return ffi::Error::Success();
  }
  // Few rows are cut by their outputs too, so that all threads have work.
  const int64_t groups = CeilDiv(rows, kRowsAtOnce), pairs = CeilDiv(n / 16, kernel.blocks_together);
  const int64_t wanted = CeilDiv(kUnitsOfThread * NumThreads(pool), groups);
  const int64_t worth = Max<int64_t>(1, CeilDiv(rows, groups) * n * k / kUnitProducts);
  const int64_t parts = Min(pairs, Min(wanted, worth));
  const auto block = [&](int64_t part) { return Min(part * pairs / parts * kernel.blocks_together, n / 16); };
  if (kernel.divide && groups > 1) {
    char* pieces = Scratch<struct Float32Divided>(kernel.pieces_bytes(job));
    ParallelFor(pool, pairs, [&](int64_t pair) {
      const int64_t first = pair * kernel.blocks_together;
      kernel.divide(job, first, Min(kernel.blocks_together, n / 16 - first), pieces);
    });
    job.pieces = pieces;
  }
  const int64_t panels = CeilDiv(rows, kernel.rows_together);
  const auto row = [&](int64_t group) { return Min(group * panels / groups * kernel.rows_together, rows); };
  ParallelFor(pool, groups * parts, [&](int64_t unit) {
    const int64_t group = unit / parts, part = unit % parts;
    kernel.multiply(job, row(group), row(group + 1) - row(group), block(part), block(part + 1) - block(part));
  });
  if (job.normed) {
    const int64_t per_call = Max<int64_t>(1, kNumbersPerCall / n);
    ParallelFor(pool, CeilDiv(rows, per_call),
                [&](int64_t i) { kernel.normalize(job, i * per_call, Min(per_call, rows - i * per_call)); });
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace penstock

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* penstock_float32(XLA_FFI_CallFrame* frame) {
  using namespace penstock;
  using F32 = ffi::Buffer<ffi::F32>;
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<F32>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .Arg<F32>()
                             .Arg<F32>()
                             .Arg<F32>()
                             .RemainingRets()
                             .Attr<int32_t>("plain")
                             .Attr<bool>("normed")
                             .Attr<float>("eps")
                             .Attr<float>("offset")
                             .Attr<int64_t>("bias")
                             .Attr<int64_t>("norm")
                             .Attr<int64_t>("norm_bias")
                             .To(Guarded<&Float32>::Call)
                             .release();
  return handler->Call(frame);
}
