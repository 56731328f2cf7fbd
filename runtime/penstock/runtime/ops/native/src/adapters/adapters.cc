// The FFI operation `penstock_adapt`: see adapters.h.
#include "adapters/adapters.h"

#include <algorithm>
#include <vector>

#include "common/common.h"
#include "common/cpu.h"
#include "common/guarded.h"
#include "common/parallel.h"
#include "common/scratch.h"
#include "xla/ffi/api/ffi.h"

namespace penstock {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kColumns = 512;  // outputs of a unit of work: some microseconds

// A unit of work of `up`: some outputs of one part, for all rows.
struct Columns {
  int64_t part, b, outputs, column, first, last;
};

// The rows that have an adapter, in groups of one slot.
std::vector<AdaptedRows> Groups(const uint16_t* x, const int32_t* slots, int64_t rows, int64_t num_slots,
                                const uint16_t* pool, int64_t of_slot, const AdapterJob& job, float* small,
                                int64_t of_row, float* y, int64_t outputs) {
  std::vector<int32_t> order;
  for (int32_t row = 0; row < rows; ++row) {
    if (slots[row] > 0 && slots[row] < num_slots) {
      order.push_back(row);
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return slots[a] < slots[b]; });
  std::vector<AdaptedRows> groups;
  for (size_t i = 0; i < order.size(); ++i) {
    const int64_t row = order[i], slot = slots[row];
    if (i == 0 || slot != slots[order[i - 1]] || groups.back().count == kRowsTogether) {
      groups.push_back({{}, {}, {}, pool + slot * of_slot, 0});
    }
    AdaptedRows& group = groups.back();
    group.x[group.count] = x + row * job.k;
    group.small[group.count] = small + static_cast<int64_t>(i) * of_row;
    group.y[group.count] = y + row * outputs;
    ++group.count;
  }
  return groups;
}

// x bf16 [T, K]; num_rows int32 []: rows from this one on are padding, and are not written; slots int32 [T]: rows of
// slot 0 are not written; pool bf16 [slots, any], where a slot's matrices begin at `at`. Returns y [T, sum of parts].
ffi::Error Adapt(ffi::ThreadPool threads, ffi::Buffer<ffi::BF16> x, ffi::Buffer<ffi::S32> num_rows,
                 ffi::Buffer<ffi::S32> slots, ffi::Buffer<ffi::BF16> pool, ffi::Result<ffi::Buffer<ffi::F32>> y,
                 int64_t at, int64_t rank, ffi::Span<const int64_t> parts) {
  const auto get = ForCurrentIsa(AdaptersAvx2, AdaptersAvx512, AdaptersAvx512, AdaptersAvx512);
  if (!get) {
    return ffi::Error::Internal("no kernel for this processor");
  }
  const AdapterKernel& kernel = get();
  const AdapterJob job{x.dimensions()[1], rank};
  const int64_t rows = Min<int64_t>(num_rows.typed_data()[0], x.dimensions()[0]);
  const int64_t num_parts = static_cast<int64_t>(parts.size()), outputs = y->dimensions()[1];
  int64_t column = 0, end = num_parts * job.k;
  std::vector<Columns> columns;
  for (int64_t part = 0; part < num_parts; ++part) {
    if (parts[part] % 16 != 0) {
      return ffi::Error::InvalidArgument("the outputs of a part must be a multiple of 16");
    }
    for (int64_t first = 0; first < parts[part]; first += kColumns) {
      columns.push_back({part, end * rank, parts[part], column, first, Min(first + kColumns, parts[part])});
    }
    column += parts[part];
    end += parts[part];
  }
  if (rank % 16 != 0 || job.k % 16 != 0 || column != outputs || at + end * rank > pool.dimensions()[1]) {
    return ffi::Error::InvalidArgument("sizes that do not fit each other, or are no multiples of 16");
  }
  float* small = reinterpret_cast<float*>(Scratch<struct AdapterSmall>(Max<int64_t>(rows, 1) * num_parts * rank * 4));
  const std::vector<AdaptedRows> groups =
      Groups(reinterpret_cast<const uint16_t*>(x.untyped_data()), slots.typed_data(), rows, pool.dimensions()[0],
             reinterpret_cast<const uint16_t*>(pool.untyped_data()) + at, pool.dimensions()[1], job, small,
             num_parts * rank, y->typed_data(), outputs);
  const int64_t count = static_cast<int64_t>(groups.size()), blocks = static_cast<int64_t>(columns.size());
  ParallelFor(threads, count * num_parts, [&](int64_t i) { kernel.down(job, groups[i / num_parts], i % num_parts); });
  ParallelFor(threads, count * blocks, [&](int64_t i) {
    const AdaptedRows& group = groups[i / blocks];
    const Columns& c = columns[i % blocks];
    kernel.up(job, group, c.part, group.matrices + c.b, c.outputs, c.column, c.first, c.last);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace penstock

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* penstock_adapt(XLA_FFI_CallFrame* frame) {
  using namespace penstock;
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<ffi::Buffer<ffi::BF16>>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .Arg<ffi::Buffer<ffi::BF16>>()
                             .Ret<ffi::Buffer<ffi::F32>>()
                             .Attr<int64_t>("at")
                             .Attr<int64_t>("rank")
                             .Attr<ffi::Span<const int64_t>>("parts")
                             .To(Guarded<&Adapt>::Call)
                             .release();
  return handler->Call(frame);
}
