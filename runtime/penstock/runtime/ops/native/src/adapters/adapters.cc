// The FFI operation `penstock_adapt`, and what experts also call: see adapt.h.
#include "adapters/adapt.h"

#include <algorithm>
#include <functional>

#include "common/common.h"
#include "common/cpu.h"
#include "common/guarded.h"
#include "common/parallel.h"
#include "common/scratch.h"

namespace penstock {

namespace ffi = xla::ffi;

int64_t AdapterSizes::Outputs() const {
  int64_t sum = 0;
  for (const int64_t outputs : parts) {
    sum += outputs;
  }
  return sum;
}

int64_t AdapterSizes::NumValues() const { return (static_cast<int64_t>(parts.size()) * k + Outputs()) * rank; }

bool AdapterSizes::AreMultiples() const {
  return k % 16 == 0 && rank % 16 == 0 &&
         std::all_of(parts.begin(), parts.end(), [](int64_t outputs) { return outputs % 16 == 0; });
}

namespace {

constexpr int64_t kColumns = 512;       // outputs of a unit of work: some microseconds
constexpr int64_t kGroupsOfThread = 4;  // with so many, whole groups are units of work: threads end at about one time

// A unit of work of `up`: some outputs of one part, for the rows of a group.
struct Columns {
  int64_t part, b, outputs, column, first, last;
};

}  // namespace

bool Adapt(ffi::ThreadPool& threads, const AdapterSizes& sizes, std::vector<AdaptedRow>& rows) {
  const auto get = ForCurrentIsa(AdaptersAvx2, AdaptersAvx512, AdaptersAvx512, AdaptersAvx512);
  if (!get) {
    return false;
  }
  const AdapterKernel& kernel = get();
  const int64_t num_parts = static_cast<int64_t>(sizes.parts.size()), of_row = num_parts * sizes.rank;
  std::vector<Columns> columns;
  int64_t column = 0, end = num_parts * sizes.k;
  for (int64_t part = 0; part < num_parts; ++part) {
    const int64_t outputs = sizes.parts[part];
    for (int64_t first = 0; first < outputs; first += kColumns) {
      columns.push_back({part, end * sizes.rank, outputs, column, first, Min(first + kColumns, outputs)});
    }
    column += outputs;
    end += outputs;
  }
  std::stable_sort(rows.begin(), rows.end(), [](const AdaptedRow& a, const AdaptedRow& b) {
    return std::less<const uint16_t*>()(a.matrices, b.matrices);
  });
  const int64_t num_rows = static_cast<int64_t>(rows.size());
  float* small = reinterpret_cast<float*>(Scratch<struct AdapterSmall>(Max<int64_t>(num_rows, 1) * of_row * 4));
  std::vector<AdaptedRows> groups;
  for (int64_t row = 0; row < num_rows; ++row) {
    if (row == 0 || rows[row].matrices != rows[row - 1].matrices || groups.back().count == kRowsTogether) {
      groups.push_back({&rows[row], 0, small + row * of_row, of_row});
    }
    ++groups.back().count;
  }
  const int64_t count = static_cast<int64_t>(groups.size()), blocks = static_cast<int64_t>(columns.size());
  const auto down = [&](const AdaptedRows& group, int64_t first, int64_t last) {
    float* wide = reinterpret_cast<float*>(Scratch<struct AdapterWide>(kRowsTogether * WideStride(sizes.k) * 4));
    kernel.down(group, sizes.k, sizes.rank, first, last, wide);
  };
  const auto up = [&](const AdaptedRows& group, const Columns& c) {
    kernel.up(group, sizes.rank, c.part, group.rows[0].matrices + c.b, c.outputs, c.column, c.first, c.last);
  };
  if (count >= kGroupsOfThread * NumThreads(threads)) {  // threads meet once, and a group's matrices are one sweep
    ParallelFor(threads, count, [&](int64_t i) {
      down(groups[i], 0, num_parts);
      for (const Columns& c : columns) {
        up(groups[i], c);
      }
    });
    return true;
  }
  ParallelFor(threads, count * num_parts,
              [&](int64_t i) { down(groups[i / num_parts], i % num_parts, i % num_parts + 1); });
  ParallelFor(threads, count * blocks, [&](int64_t i) { up(groups[i / blocks], columns[i % blocks]); });
  return true;
}

namespace {

// x bf16 [T, K]; num_rows int32 []: rows from this one on are padding, and are not written; slots int32 [T]: rows of
// slot 0 are not written; pool bf16 [slots, any], where a slot's matrices begin at `at`. Returns y [T, sum of parts].
ffi::Error AdaptRows(ffi::ThreadPool threads, ffi::Buffer<ffi::BF16> x, ffi::Buffer<ffi::S32> num_rows,
                     ffi::Buffer<ffi::S32> slots, ffi::Buffer<ffi::BF16> pool, ffi::Result<ffi::Buffer<ffi::F32>> y,
                     int64_t at, int64_t rank, ffi::Span<const int64_t> parts) {
  const AdapterSizes sizes{x.dimensions()[1], rank, {parts.begin(), parts.end()}};
  const int64_t num_slots = pool.dimensions()[0], of_slot = pool.dimensions()[1];
  const int64_t outputs = y->dimensions()[1];
  if (!sizes.AreMultiples() || sizes.Outputs() != outputs || at + sizes.NumValues() > of_slot) {
    return ffi::Error::InvalidArgument("sizes that do not fit each other, or are no multiples of 16");
  }
  const uint16_t* values = reinterpret_cast<const uint16_t*>(pool.untyped_data()) + at;
  const uint16_t* inputs = reinterpret_cast<const uint16_t*>(x.untyped_data());
  std::vector<AdaptedRow> rows;
  for (int64_t row = 0; row < Min<int64_t>(num_rows.typed_data()[0], x.dimensions()[0]); ++row) {
    const int64_t slot = slots.typed_data()[row];
    if (slot > 0 && slot < num_slots) {
      rows.push_back({inputs + row * sizes.k, y->typed_data() + row * outputs, values + slot * of_slot, 1.0f});
    }
  }
  if (!Adapt(threads, sizes, rows)) {
    return ffi::Error::Internal("no kernel for this processor");
  }
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
                             .To(Guarded<&AdaptRows>::Call)
                             .release();
  return handler->Call(frame);
}
