// The FFI operation `penstock_experts`: for each row, the weighted sum of the gated layers of the experts that it
// chose.
//
// Rows are sorted by expert, and all chosen experts' products are one list of units of weights, which the threads
// share. So the weights of a chosen expert are read once for all of its rows, and those of other experts never. A row's
// products do not depend on the rows beside it (see linear.h), and its sum is in the order of its choices.
#include <algorithm>

#include "adapters/adapters.h"
#include "common/buffers.h"
#include "common/carver.h"
#include "common/common.h"
#include "common/guarded.h"
#include "common/lanes.h"
#include "common/parallel.h"
#include "common/scratch.h"
#include "experts/plan.h"
#include "experts/products.h"
#include "xla/ffi/api/ffi.h"

namespace penstock {
namespace {

namespace ffi = xla::ffi;

// What the rows of a pass may take between the products. More rows are computed in several passes, and each reads the
// weights anew.
constexpr int64_t kPassBytes = 128 << 20;
// With at most this many results one thread sums them up faster than it gets help.
constexpr int64_t kFewResults = 1 << 15;

struct ExpertsJob {
  const uint16_t* x;     // bf16 [any, k]
  const int32_t* ids;    // [any, per_row]
  const float* weights;  // [any, per_row]
  int64_t per_row;
  PackedGroup gate_up, down;
  Activation activation;
  float limit;
  bool weigh_input;                        // a row is multiplied by the weight before the products, not after them
  uint16_t* y;                             // bf16 [any, outputs of down]
  AdapterSizes gate_up_sizes, down_sizes;  // of adapters; rank 0: there are none
  const int32_t* slots;                    // [any]: the slot of each row's adapter; 0: none
  int64_t num_slots, of_slot;
  const uint16_t* gate_up_matrices;  // of slot 0: those of all experts, one behind the other
  const uint16_t* down_matrices;     // likewise
};

// What adapters add to one of the two layers, for the choices of a pass. `matrices` are those of slot 0.
class AdaptedChoices {
 public:
  AdaptedChoices(const ExpertsJob& job, const Choices& choices, const AdapterSizes& sizes, const uint16_t* matrices,
                 float* small)
      : job_(job), choices_(choices), sizes_(sizes), matrices_(matrices), small_(small) {
    inputs_.reserve(choices.experts.size());  // rows_ points to them
    rows_.resize(sizes.rank > 0 ? choices.rows.size() : 0);
  }

  // Notes the adapters of an expert's choices, whose rows are those of `input`.
  void Add(const Choices::Expert& expert, const LinearInput& input, LinearJob* product) {
    if (rows_.empty()) {
      return;
    }
    inputs_.push_back(input);
    for (int64_t c = expert.begin; c < expert.begin + expert.count; ++c) {
      const int64_t slot = job_.slots[choices_.rows[c]];
      if (slot > 0 && slot < job_.num_slots) {
        rows_[c] = {matrices_ + slot * job_.of_slot + expert.number * sizes_.NumValues(),
                    small_ + c * sizes_.NumSmall(), &inputs_.back(), c - expert.begin};
      }
    }
    product->adapted = rows_.data() + expert.begin;
    product->adapter_sizes = &sizes_;
  }

  // Makes the products with A, when the inputs are there.
  void Multiply(ffi::ThreadPool& pool) const {
    const ProductsWithA products(sizes_, rows_, NumThreads(pool));
    ParallelFor(pool, products.num_units(), [&](int64_t unit) { products.RunUnit(unit); });
  }

 private:
  const ExpertsJob& job_;
  const Choices& choices_;
  const AdapterSizes& sizes_;
  const uint16_t* matrices_;
  float* small_;
  std::vector<LinearInput> inputs_;
  std::vector<AdaptedRow> rows_;
};

// y of `row` = the sum of its choices' results, each times its weight. A row's first choice is places[0].
void SumRow(const ExpertsJob& job, const Choices& choices, const int64_t* places, const float* results, uint16_t* y) {
  const int64_t outputs = job.down.Outputs();
  for (int64_t i = 0; i < outputs; i += 16) {
    Lanes sum = Fill(0.0f);
    for (int64_t c = 0; c < job.per_row; ++c) {
      if (places[c] < 0) {
        continue;
      }
      const Lanes result = Load(results + places[c] * outputs + i);
      sum = Add(sum, job.weigh_input ? result : Mul(result, Fill(choices.weights[places[c]])));
    }
    StoreBf16(y + i, sum);
  }
}

void Pass(const ExpertsJob& job, ffi::ThreadPool& pool, int64_t first, int64_t last) {
  const Choices choices = SortChoices(job.ids, job.weights, first, last, job.per_row, job.gate_up.number);
  const int64_t count = (last - first) * job.per_row, inner = job.down.k, outputs = job.down.Outputs();
  uint16_t* gated = nullptr;
  float *results = nullptr, *small_up = nullptr, *small_down = nullptr;
  const auto carve = [&](Carver carver) {
    gated = carver.Take<uint16_t>(count * inner);
    results = carver.Take<float>(count * outputs);
    small_up = carver.Take<float>(count * job.gate_up_sizes.NumSmall());
    small_down = carver.Take<float>(count * job.down_sizes.NumSmall());
    return carver.used();
  };
  carve(Carver(Scratch<struct ExpertResults>(carve(Carver(nullptr)))));
  AdaptedChoices adapted_up(job, choices, job.gate_up_sizes, job.gate_up_matrices, small_up);
  AdaptedChoices adapted_down(job, choices, job.down_sizes, job.down_matrices, small_down);

  Products first_products(*CurrentLinearKernel(job.gate_up.format));
  Products second_products(*CurrentLinearKernel(job.down.format));
  const int64_t inner_blocks = job.down.k / kBlockOut;
  for (const Choices::Expert& expert : choices.experts) {
    LinearJob up{};
    up.m = expert.count;
    up.k = job.gate_up.k;
    up.format = job.gate_up.format;
    up.weights[0] = job.gate_up.Part(expert.number, 0, inner_blocks);
    up.weights[1] = job.gate_up.Part(expert.number, inner_blocks, inner_blocks);
    up.num_weights = 2;
    up.activation = job.activation;
    up.limit = job.limit;
    up.y_bf16 = gated + expert.begin * inner;
    up.ldy = inner;
    LinearInput chosen{};
    chosen.x = job.x;
    chosen.stride = up.k;
    chosen.rows = choices.rows.data() + expert.begin;
    chosen.factors = job.weigh_input ? choices.weights.data() + expert.begin : nullptr;
    adapted_up.Add(expert, chosen, &up);
    first_products.Add(up, chosen);

    LinearJob down{};
    down.m = expert.count;
    down.k = inner;
    down.format = job.down.format;
    down.weights[0] = job.down.Part(expert.number, 0, job.down.num_blocks);
    down.num_weights = 1;
    down.y_f32 = results + expert.begin * outputs;
    down.ldy = outputs;
    LinearInput from_up{};
    from_up.x = up.y_bf16;
    from_up.stride = inner;
    adapted_down.Add(expert, from_up, &down);
    second_products.Add(down, from_up);
  }
  adapted_up.Multiply(pool);
  first_products.Run(pool);
  adapted_down.Multiply(pool);
  second_products.Run(pool);

  const int64_t rows_at_once = std::max<int64_t>(1, kFewResults / (job.per_row * outputs));
  ParallelFor(pool, CeilDiv(last - first, rows_at_once), [&](int64_t part) {
    const int64_t begin = first + part * rows_at_once;
    for (int64_t row = begin; row < std::min(begin + rows_at_once, last); ++row) {
      SumRow(job, choices, &choices.places[(row - first) * job.per_row], results, job.y + row * outputs);
    }
  });
}

// x bf16 [T, K]; num_rows int32 []: rows from this one on are padding, and are not written in y; ids int32 and weights
// float32 [T, k]; then tiles, scale and bias of gate_up, whose first half of outputs is the gate, and of down. `at`
// says where the scales and the biases of both begin in arrays that may hold more. slots int32 [T] and pool bf16
// [slots, any] are those of adapters (adapters.h), and `adapters` says their rank, and where in a slot the matrices of
// gate_up and of down begin, each of all experts; rank 0: there are none.
ffi::Error Experts(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> x, ffi::Buffer<ffi::S32> num_rows,
                   ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::F32> weights, ffi::AnyBuffer gate_up,
                   ffi::Buffer<ffi::F32> gate_up_scale, ffi::Buffer<ffi::BF16> gate_up_bias, ffi::AnyBuffer down,
                   ffi::Buffer<ffi::F32> down_scale, ffi::Buffer<ffi::BF16> down_bias, ffi::Buffer<ffi::S32> slots,
                   ffi::Buffer<ffi::BF16> adapter_pool, ffi::Result<ffi::Buffer<ffi::BF16>> y, int64_t activation,
                   float limit, bool weigh_input, ffi::Span<const int64_t> at, ffi::Span<const int64_t> adapters) {
  if (at.size() != 4 || adapters.size() != 3 || !IsGated(activation)) {
    return ffi::Error::InvalidArgument("`at` has four places, `adapters` has three, and the activation is a gated one");
  }
  ExpertsJob job{};
  job.x = reinterpret_cast<const uint16_t*>(x.untyped_data());
  job.ids = ids.typed_data();
  job.weights = weights.typed_data();
  job.per_row = ids.dimensions()[1];
  job.gate_up = GroupOf(gate_up, gate_up_scale, at[0], gate_up_bias, at[1], x.dimensions()[1]);
  job.down = GroupOf(down, down_scale, at[2], down_bias, at[3], job.gate_up.Outputs() / 2);
  job.activation = static_cast<Activation>(activation);
  job.limit = limit;
  job.weigh_input = weigh_input;
  job.y = reinterpret_cast<uint16_t*>(y->untyped_data());
  if (job.gate_up.k != x.dimensions()[1] || job.gate_up.Outputs() != 2 * job.down.k ||
      job.gate_up.number != job.down.number || job.down.Outputs() != y->dimensions()[1]) {
    return ffi::Error::InvalidArgument("x, gate_up, down and the result do not fit together");
  }
  const int64_t rank = adapters[0], inner = job.down.k;
  if (rank > 0) {
    job.gate_up_sizes = {job.gate_up.k, rank, {inner, inner}};
    job.down_sizes = {inner, rank, {job.down.Outputs()}};
    job.slots = slots.typed_data();
    job.num_slots = adapter_pool.dimensions()[0];
    job.of_slot = adapter_pool.dimensions()[1];
    const uint16_t* values = reinterpret_cast<const uint16_t*>(adapter_pool.untyped_data());
    job.gate_up_matrices = values + adapters[1];
    job.down_matrices = values + adapters[2];
    if (!job.gate_up_sizes.AreMultiples() || !job.down_sizes.AreMultiples() ||
        slots.dimensions()[0] != x.dimensions()[0] ||
        adapters[1] + job.gate_up.number * job.gate_up_sizes.NumValues() > job.of_slot ||
        adapters[2] + job.down.number * job.down_sizes.NumValues() > job.of_slot) {
      return ffi::Error::InvalidArgument("adapters that do not fit, or whose sizes are no multiples of 16");
    }
  }
  const LinearKernel* up_kernel = CurrentLinearKernel(job.gate_up.format);
  const LinearKernel* down_kernel = CurrentLinearKernel(job.down.format);
  if (!up_kernel || !down_kernel) {
    return ffi::Error::Internal("no kernel for this processor");
  }
  const int64_t most = x.dimensions()[0], rows = std::min<int64_t>(num_rows.typed_data()[0], most);
  const int64_t choice_bytes = std::max(up_kernel->x_bytes(1, job.gate_up.k, job.gate_up.format),
                                        down_kernel->x_bytes(1, job.down.k, job.down.format)) +
                               job.down.k * 2 + job.down.Outputs() * 4 +
                               (job.gate_up_sizes.NumSmall() + job.down_sizes.NumSmall()) * 4;
  const int64_t rows_in_pass = std::max<int64_t>(1, kPassBytes / (choice_bytes * job.per_row));
  const int64_t passes = rows > 0 ? CeilDiv(rows, rows_in_pass) : 0;
  for (int64_t pass = 0; pass < passes; ++pass) {  // of equal sizes
    Pass(job, pool, pass * rows / passes, (pass + 1) * rows / passes);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace penstock

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* penstock_experts(XLA_FFI_CallFrame* frame) {
  using namespace penstock;
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<ffi::Buffer<ffi::BF16>>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .Arg<ffi::Buffer<ffi::F32>>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::Buffer<ffi::F32>>()
                             .Arg<ffi::Buffer<ffi::BF16>>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::Buffer<ffi::F32>>()
                             .Arg<ffi::Buffer<ffi::BF16>>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .Arg<ffi::Buffer<ffi::BF16>>()
                             .Ret<ffi::Buffer<ffi::BF16>>()
                             .Attr<int64_t>("activation")
                             .Attr<float>("limit")
                             .Attr<bool>("weigh_input")
                             .Attr<ffi::Span<const int64_t>>("at")
                             .Attr<ffi::Span<const int64_t>>("adapters")
                             .To(Guarded<&Experts>::Call)
                             .release();
  return handler->Call(frame);
}
