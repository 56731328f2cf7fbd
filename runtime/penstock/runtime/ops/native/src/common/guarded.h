// Turns exceptions into errors of XLA, which is built without exceptions.
#pragma once

#include <exception>
#include <new>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace penstock {

// Guarded<&Function>::Call calls the function of an FFI operation. What the function throws becomes the operation's
// error.
template <auto kFunction>
struct Guarded;

template <typename... Args, xla::ffi::Error (*kFunction)(Args...)>
struct Guarded<kFunction> {
  static xla::ffi::Error Call(Args... args) {
    try {
      return kFunction(std::move(args)...);
    } catch (const std::bad_alloc&) {
      return xla::ffi::Error(xla::ffi::ErrorCode::kResourceExhausted, "no memory for a native kernel to work in");
    } catch (const std::exception& error) {
      return xla::ffi::Error::Internal(error.what());
    }
  }
};

}  // namespace penstock
