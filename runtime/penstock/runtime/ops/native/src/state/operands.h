// What the FFI operations of recurrent layers share.
#pragma once

#include "common/cpu.h"
#include "state/state.h"
#include "xla/ffi/api/ffi.h"

namespace penstock {
namespace {

// The kernels for the instruction set in use; null if there are none.
inline const StateKernels* CurrentStateKernels() {
  const auto kernels = ForCurrentIsa(StateAvx2, StateAvx512, StateAvx512, StateAvx512);
  return kernels ? &kernels() : nullptr;
}

// The operands of MakeRows; `cut` and `cut_to` are empty if no row's state is kept on the way.
inline RowOperands OperandsOf(const xla::ffi::Buffer<xla::ffi::S32>& q_lens,
                              const xla::ffi::Buffer<xla::ffi::S32>& from, const xla::ffi::Buffer<xla::ffi::S32>& to,
                              const xla::ffi::Buffer<xla::ffi::S32>& cut, const xla::ffi::Buffer<xla::ffi::S32>& cut_to,
                              int64_t num_tokens, int64_t num_entries) {
  const bool cuts = cut.element_count() != 0;
  return {q_lens.typed_data(),
          from.typed_data(),
          to.typed_data(),
          cuts ? cut.typed_data() : nullptr,
          cuts ? cut_to.typed_data() : nullptr,
          static_cast<int64_t>(q_lens.element_count()),
          num_tokens,
          num_entries};
}

}  // namespace
}  // namespace penstock
