// The FFI operation `penstock_sample`: see sample.h.
#include "sample/sample.h"

#include <immintrin.h>

#include <algorithm>
#include <vector>

#include "common/cpu.h"
#include "common/guarded.h"
#include "common/parallel.h"
#include "common/scratch.h"
#include "sample/sample_codes.h"
#include "sample/sample_row.h"
#include "xla/ffi/api/ffi.h"

namespace penstock {
namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

struct RowMemory;

const SampleKernel* Kernel() {
  const auto kernel = ForCurrentIsa(SampleAvx2, SampleAvx512, SampleAvx512, SampleAvx512);
  return kernel ? &kernel() : nullptr;
}

// While this object lives, its thread computes with denormal numbers. XLA's own threads treat them as 0, other threads
// do not.
class PlainFloats {
 public:
  PlainFloats() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~PlainFloats() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
};

// The inputs of `sample` in ops/native/sample.py, in its order.
struct Inputs {
  Floats logits;
  Ints history;
  Floats bias;
  Ints mask;
  Floats uniforms;
  Ints slots, features;
  Ints ints;
  Floats floats;
  Ints stop_ids, banned, num_logprobs;

  int64_t rows() const { return logits.dimensions()[0]; }
  int64_t vocab() const { return logits.dimensions()[1]; }

  bool Fit() const {
    const int64_t words = (vocab() + 31) / 32;
    const auto is = [](auto dims, int64_t first, int64_t second) {
      return dims.size() == 2 && dims[0] == first && dims[1] == second;
    };
    const auto column = [&](const auto& buffer) { return static_cast<int64_t>(buffer.element_count()) == rows(); };
    return vocab() > 0 && history.dimensions().size() == 2 && is(history.dimensions(), bias.dimensions()[0], vocab()) &&
           is(bias.dimensions(), history.dimensions()[0], vocab()) && is(mask.dimensions(), rows(), words) &&
           is(uniforms.dimensions(), rows(), 2) && stop_ids.dimensions().size() == 2 &&
           stop_ids.dimensions()[0] == rows() && column(slots) && column(features) &&
           is(ints.dimensions(), rows(), kSampleInts) && is(floats.dimensions(), rows(), kSampleFloats) &&
           column(banned) && column(num_logprobs);
  }

  SampleRow MakeRow(int64_t r, int64_t most_top) const {
    const int64_t slot = slots.typed_data()[r], words = (vocab() + 31) / 32;
    const int32_t with = features.typed_data()[r];
    SampleRow row{};
    row.vocab = vocab();
    row.logits = logits.typed_data() + r * vocab();
    row.history = with & kPenalties ? history.typed_data() + slot * vocab() : nullptr;
    row.bias = with & kBias ? bias.typed_data() + slot * vocab() : nullptr;
    row.mask = with & kMask ? mask.typed_data() + r * words : nullptr;
    const int64_t width = stop_ids.dimensions()[1];
    row.stop_ids = stop_ids.typed_data() + r * width;
    row.num_stop_ids = banned.typed_data()[r] ? width : 0;
    row.ints = ints.typed_data() + r * kSampleInts;
    row.floats = floats.typed_data() + r * kSampleFloats;
    row.uniforms = uniforms.typed_data() + r * 2;
    row.num_top = std::min<int64_t>(num_logprobs.typed_data()[r], most_top);
    return row;
  }
};

ffi::Error Sample(ffi::ThreadPool pool, Floats logits, Ints history, Floats bias, Ints mask, Floats uniforms,
                  Ints slots, Ints features, Ints ints, Floats floats, Ints stop_ids, Ints banned, Ints num_logprobs,
                  ffi::Result<Ints> tokens, ffi::Result<Floats> logprobs, ffi::Result<Ints> top_ids,
                  ffi::Result<Floats> top_logprobs) {
  const SampleKernel* kernel = Kernel();
  if (!kernel) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented, "no kernel for this processor");
  }
  const Inputs in{logits, history, bias, mask, uniforms, slots, features, ints, floats, stop_ids, banned, num_logprobs};
  if (logits.dimensions().size() != 2 || !in.Fit()) {
    return ffi::Error::InvalidArgument("sample: shapes do not fit");
  }

  const int64_t num_top = top_ids->dimensions()[1], num_slots = history.dimensions()[0];
  std::fill_n(tokens->typed_data(), tokens->element_count(), 0);
  std::fill_n(logprobs->typed_data(), logprobs->element_count(), 0.0f);
  std::fill_n(top_ids->typed_data(), top_ids->element_count(), 0);
  std::fill_n(top_logprobs->typed_data(), top_logprobs->element_count(), 0.0f);
  std::vector<int64_t> live;
  for (int64_t r = 0; r < in.rows(); ++r) {
    const int64_t slot = slots.typed_data()[r];
    if (slot >= 0 && slot < num_slots) {
      live.push_back(r);
    }
  }

  int64_t bytes;
  CarveSample(nullptr, in.vocab(), num_top, &bytes);
  const auto run = [&](int64_t r, const EachBlock& each) {
    int64_t used;
    const SampleWork work = CarveSample(Scratch<RowMemory>(bytes), in.vocab(), num_top, &used);
    const SampleResult result{tokens->typed_data() + r, logprobs->typed_data() + r, top_ids->typed_data() + r * num_top,
                              top_logprobs->typed_data() + r * num_top};
    const PlainFloats plain;
    SampleToken(*kernel, in.MakeRow(r, num_top), work, each, result);
  };
  const int64_t blocks = SampleBlocks(in.vocab());
  const auto alone = [&](const std::function<void(int64_t)>& body) {
    for (int64_t block = 0; block < blocks; ++block) {
      body(block);
    }
  };
  const auto together = [&](const std::function<void(int64_t)>& body) {
    ParallelFor(pool, blocks, [&](int64_t block) {
      const PlainFloats plain;
      body(block);
    });
  };
  // As long as there is a row for every thread, each thread takes a whole row, which then stays in its cache. All
  // threads share the last few rows, one after the other, unless fewer than half of the threads would be without a row.
  const int64_t count = static_cast<int64_t>(live.size()), threads = NumThreads(pool);
  int64_t whole = count / threads * threads;
  if (2 * (count - whole) > threads) {
    whole = count;
  }
  ParallelFor(pool, whole, [&](int64_t i) { run(live[i], alone); });
  for (int64_t i = whole; i < count; ++i) {
    run(live[i], together);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace penstock

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* penstock_sample(XLA_FFI_CallFrame* frame) {
  using namespace penstock;
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<Floats>()
                             .Arg<Ints>()
                             .Arg<Floats>()
                             .Arg<Ints>()
                             .Arg<Floats>()
                             .Arg<Ints>()
                             .Arg<Ints>()
                             .Arg<Ints>()
                             .Arg<Floats>()
                             .Arg<Ints>()
                             .Arg<Ints>()
                             .Arg<Ints>()
                             .Ret<Ints>()
                             .Ret<Floats>()
                             .Ret<Ints>()
                             .Ret<Floats>()
                             .To(Guarded<&Sample>::Call)
                             .release();
  return handler->Call(frame);
}
