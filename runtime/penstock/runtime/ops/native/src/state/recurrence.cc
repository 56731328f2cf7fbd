// The FFI operation `penstock_recurrence`: see state.h.
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

// Each type names one use of the memory that a thread keeps (see Scratch).
struct Outputs;
struct Work;

constexpr int64_t kCallsPerThread = 4;       // so many calls for each thread share the work evenly enough
constexpr int64_t kValuesPerCall = 32;       // of a head, at least
constexpr int64_t kNormedPerCall = 8 << 10;  // channels, worth some microseconds

// How many values of a head each call takes: all of them where there are enough heads for all threads. A long row has
// as many calls as a short one.
int64_t ValuesPerCall(const RecurrenceJob& job, int64_t num_rows, int64_t threads) {
  int64_t values = job.value_dim;
  while (values % (2 * kValuesPerCall) == 0 &&
         num_rows * job.heads * (job.value_dim / values) < threads * kCallsPerThread) {
    values /= 2;
  }
  return values;
}

// Of T tokens: mixed [T, channels], bf16 or float32: in the delta rule queries, keys and values, in Mamba-2 values,
// keys and queries (x, B and C); gate [T, H * V], like mixed; logits float32 [T, H], or [T, 2 H] in the delta rule;
// state float32 [S, H, K, V], updated in place; a_log and dt_bias float32 [H]; skip float32 [H] or [0]; norm float32
// [V], or [H * V] for runs of `run` channels; the rows as MakeRows takes them, where cut and cut_to may be [0]. Returns
// out [T, H * V], like mixed, which is 0 from the last row's end on.
ffi::Error Recurrence(ffi::ThreadPool pool, ffi::AnyBuffer mixed, ffi::AnyBuffer gate, ffi::Buffer<ffi::F32> logits,
                      ffi::Buffer<ffi::F32> state_in, ffi::Buffer<ffi::F32> a_log, ffi::Buffer<ffi::F32> dt_bias,
                      ffi::Buffer<ffi::F32> skip, ffi::Buffer<ffi::F32> norm, ffi::Buffer<ffi::S32> q_lens,
                      ffi::Buffer<ffi::S32> from, ffi::Buffer<ffi::S32> to, ffi::Buffer<ffi::S32> cut,
                      ffi::Buffer<ffi::S32> cut_to, ffi::Result<ffi::AnyBuffer> out,
                      ffi::Result<ffi::Buffer<ffi::F32>> state, bool delta, int64_t key_heads, int64_t run, float eps,
                      float dt_low, float dt_high) {
  const StateKernels* kernels = CurrentStateKernels();
  if (!kernels) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented, "no kernel for this processor");
  }
  if (state->untyped_data() != state_in.untyped_data()) {
    return ffi::Error::Internal("the state must be updated in place");
  }
  const auto shape = state->dimensions();
  const int64_t tokens = mixed.dimensions()[0];
  std::vector<StateRow> rows;
  const std::string problem = MakeRows(OperandsOf(q_lens, from, to, cut, cut_to, tokens, shape[0]), rows);
  if (!problem.empty()) {
    return ffi::Error::InvalidArgument("recurrence: " + problem);
  }
  RecurrenceJob job{};
  job.heads = shape[1], job.key_dim = shape[2], job.value_dim = shape[3];
  job.key_heads = key_heads;
  const int64_t key_channels = key_heads * job.key_dim, channels = job.heads * job.value_dim;
  job.mixed = From<char>(mixed, 0);
  job.width = mixed.dimensions()[1];
  job.query_at = delta ? 0 : channels + key_channels;
  job.key_at = delta ? key_channels : channels;
  job.value_at = delta ? 2 * key_channels : 0;
  job.logits = logits.typed_data();
  job.a_log = a_log.typed_data();
  job.dt_bias = dt_bias.typed_data();
  job.skip = From<float>(skip, 0);
  job.state = state->typed_data();
  job.dt_low = dt_low, job.dt_high = dt_high;
  job.bf16 = mixed.element_type() == ffi::BF16;
  job.delta = delta;
  job.aligned = reinterpret_cast<uintptr_t>(job.state) % kCacheLine == 0;
  if (job.key_dim % 16 != 0 || job.value_dim % 16 != 0 || job.heads % key_heads != 0 ||
      job.width != 2 * key_channels + channels || channels % run != 0 || run % 16 != 0) {
    return ffi::Error::InvalidArgument("recurrence: the sizes of a head must be multiples of 16, and fit each other");
  }
  const int64_t used = NumTokens(rows), bytes = channels * (job.bf16 ? 2 : 4);
  auto* written = static_cast<char*>(out->untyped_data());
  memset(written + used * bytes, 0, (tokens - used) * bytes);
  job.y = reinterpret_cast<float*>(Scratch<Outputs>(used * channels * 4));

  const auto num_rows = static_cast<int64_t>(rows.size());
  const int64_t values = ValuesPerCall(job, num_rows, NumThreads(pool)), parts = job.value_dim / values;
  ParallelFor(pool, num_rows * job.heads * parts, [&](int64_t call) {
    const int64_t low = call % parts * values, head = call / parts % job.heads;
    kernels->recur(job, rows[call / parts / job.heads], head, low, low + values, Scratch<Work>(job.scratch_bytes()));
  });

  GatedNormJob after{};
  after.y = job.y;
  after.gate = From<char>(gate, 0);
  after.norm = norm.typed_data();
  after.out = written;
  after.channels = channels, after.size = run;
  after.eps = eps;
  after.bf16 = job.bf16;
  after.gate_first = !delta;
  after.shared_norm = static_cast<int64_t>(norm.element_count()) == run;
  const int64_t per_call = Max<int64_t>(1, kNormedPerCall / channels);
  ParallelFor(pool, CeilDiv(used, per_call),
              [&](int64_t i) { kernels->gated_norm(after, i * per_call, Min(used, (i + 1) * per_call)); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace penstock

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* penstock_recurrence(XLA_FFI_CallFrame* frame) {
  using namespace penstock;
  using Numbers = ffi::Buffer<ffi::S32>;
  using Floats = ffi::Buffer<ffi::F32>;
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<Floats>()
                             .Arg<Floats>()
                             .Arg<Floats>()
                             .Arg<Floats>()
                             .Arg<Floats>()
                             .Arg<Floats>()
                             .Arg<Numbers>()
                             .Arg<Numbers>()
                             .Arg<Numbers>()
                             .Arg<Numbers>()
                             .Arg<Numbers>()
                             .Ret<ffi::AnyBuffer>()
                             .Ret<Floats>()
                             .Attr<bool>("delta")
                             .Attr<int64_t>("key_heads")
                             .Attr<int64_t>("run")
                             .Attr<float>("eps")
                             .Attr<float>("dt_low")
                             .Attr<float>("dt_high")
                             .To(Guarded<&Recurrence>::Call)
                             .release();
  return handler->Call(frame);
}
