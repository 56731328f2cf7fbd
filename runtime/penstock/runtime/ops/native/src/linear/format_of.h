// The format of a weight that an FFI operation gets.
#pragma once

#include <optional>

#include "linear/linear.h"
#include "xla/ffi/api/ffi.h"

namespace penstock {

// That of tiles whose dimension `blocks` is out / 16, of a weight with k inputs; nothing if no format has this type and
// this shape.
inline std::optional<Format> FormatOf(const xla::ffi::AnyBuffer& tiles, size_t blocks, int64_t k) {
  const auto type = tiles.element_type();
  const int64_t size = tiles.dimensions()[blocks + 1];
  if (type == xla::ffi::BF16 && size * 32 == k) {
    return Format::kBf16;
  }
  if (type == xla::ffi::S8 && size * 64 == k) {
    return Format::kInt8;
  }
  for (Format format : {Format::kCodes4, Format::kCodes4Zeros, Format::kCodes8, Format::kCodes8Zeros,
                        Format::kCodes4Minima, Format::kCodes8Minima, Format::kNested4, Format::kNested6,
                        Format::kTable4, Format::kE2m1, Format::kE4m3Groups, Format::kE4m3}) {
    if (type == xla::ffi::U8 && k % InputsAtOnce(format) == 0 && size == BytesOfBlock(format, k)) {
      return format;
    }
  }
  return std::nullopt;
}

}  // namespace penstock
