// The rows of an int8 cache: how they are written, how their scales are read, and how they become float32. In an
// unnamed namespace, like lanes.h.
//
// An int8 row is converted without its scale, which multiplies the key's scores or the value's probabilities instead.
// int8 values are exact in bf16 and in float32.
#pragma once

#include <cstring>

#include "attention/attention.h"
#include "attention/attention_spread.h"
#include "common/common.h"
#include "common/int8.h"
#include "common/vec.h"

namespace penstock {
namespace {

template <typename T>
void QuantizeTo(const T* numbers, int64_t dim, char* to) {
  const float peak = RowPeak(numbers, dim), scale = peak < kLeastPeak ? 0.0f : peak * (1.0f / 127.0f);
  Quantize(numbers, dim, Int8Inverse(peak), reinterpret_cast<int8_t*>(to));
  memcpy(to + dim, &scale, sizeof scale);
}

template <typename T>
void QuantizeFrom(const T* numbers, int64_t dim, bool spreads, char* to) {
  if (!spreads) {
    QuantizeTo(numbers, dim, to);
    return;
  }
  alignas(64) float spread[kMostDims];
  Spread(numbers, dim, spread);
  QuantizeTo(spread, dim, to);
}

// Writes a new key (value = 0) or value (value = 1) to its row of an int8 cache, with the same bits as quantize_rows of
// kv_rows.py. If a number is not finite, the scale is not either.
inline void QuantizeRow(const AttentionJob& job, const char* from, int value, char* to) {
  const bool spreads = job.spreads() && value == 0;
  if (job.bf16) {
    QuantizeFrom(reinterpret_cast<const uint16_t*>(from), job.dim, spreads, to);
  } else {
    QuantizeFrom(reinterpret_cast<const float*>(from), job.dim, spreads, to);
  }
}

// Reads the scales of keys [begin, end) of a split from its tiles of an int8 cache; `to` is float[kSplit].
inline void ReadScales(const AttentionJob& job, const char* const* tiles, int begin, int end, float* to) {
  const int64_t stride = job.cache_row_bytes();
  for (int key = begin; key < end;) {
    const int stop = Min(end, (key / kKeyTile + 1) * kKeyTile);
    const char* from = tiles[key / kKeyTile] + key % kKeyTile * stride + job.dim;
    for (; key < stop; ++key, from += stride) {
      memcpy(to + key, from, sizeof(float));
    }
  }
}

// As ReadScales. Other keys, whose memory may hold anything, get 0.
inline void ReadAllScales(const AttentionJob& job, const char* const* tiles, int begin, int end, float* to) {
  memset(to, 0, kSplit * sizeof(float));
  ReadScales(job, tiles, begin, end, to);
}

// Widens `dims` int8 values of each row to float32. Rows begin every `stride` bytes, and afterwards lie side by side.
inline void WidenRows(const char* from, int64_t rows, int64_t stride, int64_t dims, float* to) {
  for (int64_t row = 0; row < rows; ++row, from += stride, to += dims) {
    const int8_t* numbers = reinterpret_cast<const int8_t*>(from);
    for (int64_t i = 0; i < dims; i += Vec::kWidth) {
      Vec::Store(to + i, Vec::Widen(numbers + i));
    }
  }
}

}  // namespace
}  // namespace penstock
