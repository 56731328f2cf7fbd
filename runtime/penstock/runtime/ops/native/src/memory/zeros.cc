// The FFI operation `penstock_zeros`: an array of zeros on huge pages, for large arrays that stay.
#include <cstring>

#include "common/common.h"
#include "common/guarded.h"
#include "common/huge_pages.h"
#include "common/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace penstock {
namespace {

namespace ffi = xla::ffi;

ffi::Error Zeros(ffi::ThreadPool pool, ffi::Result<ffi::AnyBuffer> result) {
  char* data = static_cast<char*>(result->untyped_data());
  const int64_t size = static_cast<int64_t>(result->size_bytes());
  WantHugePages(data, size);
  ParallelFor(pool, CeilDiv(size, kHugePage),
              [&](int64_t i) { std::memset(data + i * kHugePage, 0, Min(kHugePage, size - i * kHugePage)); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace penstock

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* penstock_zeros(XLA_FFI_CallFrame* frame) {
  using namespace penstock;
  static auto* handler =
      ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ret<ffi::AnyBuffer>().To(Guarded<&Zeros>::Call).release();
  return handler->Call(frame);
}
