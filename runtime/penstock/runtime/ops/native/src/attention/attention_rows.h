// The rows of the cache: how the rows of an int8 cache are written, and how rows are converted to the form in which
// they are multiplied. In an unnamed namespace, like lanes.h.
//
// An int8 row is converted without its scale, which multiplies the key's scores or the value's probabilities instead.
// int8 values are exact in bf16 and in float32.
#pragma once

#include <cstring>

#include "attention/attention.h"
#include "common/common.h"
#include "common/int8.h"
#include "common/vec.h"

namespace penstock {
namespace {

template <typename T>
void QuantizeTo(const char* from, int64_t dim, char* to) {
  const T* numbers = reinterpret_cast<const T*>(from);
  const float peak = RowPeak(numbers, dim), scale = peak < kLeastPeak ? 0.0f : peak * (1.0f / 127.0f);
  Quantize(numbers, dim, Int8Inverse(peak), reinterpret_cast<int8_t*>(to));
  memcpy(to + dim, &scale, sizeof scale);
}

// Writes a new key or value to its row of an int8 cache, with the same bits as quantize_rows of kv_rows.py. If a number
// is not finite, the scale is not either.
inline void QuantizeRow(const AttentionJob& job, const char* from, char* to) {
  if (job.bf16) {
    QuantizeTo<uint16_t>(from, job.dim, to);
  } else {
    QuantizeTo<float>(from, job.dim, to);
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

// What follows converts to bf16, of which only AVX512_BF16 and AMX multiply pairs.
#ifdef __AVX512BF16__

// Sixteen numbers as bf16, in the low halves of words.
inline __m512i Bf16Words(const uint16_t* from) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline __m512i Bf16Words(const int8_t* from) { return _mm512_srli_epi32(_mm512_castps_si512(Vec::Widen(from)), 16); }

// Converts the `dims` int8 values of each row to bf16. Rows begin every `stride` bytes, and afterwards lie side by
// side.
inline void Bf16Rows(const char* from, int64_t rows, int64_t stride, int64_t dims, uint16_t* to) {
  for (int64_t row = 0; row < rows; ++row, from += stride, to += dims) {
    const int8_t* numbers = reinterpret_cast<const int8_t*>(from);
    for (int64_t d = 0; d < dims; d += 16) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + d), _mm512_cvtepi32_epi16(Bf16Words(numbers + d)));
    }
  }
}

// Converts values [16 keys][dims], whose rows begin every `stride` bytes, to pairs of bf16 of two keys [8][dims][2], in
// which 16 dims begin every `block_words` words and pairs every `pair_words`. Keys outside [begin, end) are not read,
// because they may be NaN, and become 0.
template <typename T>
void PairValues(const char* values, int64_t stride, int64_t dims, int begin, int end, int64_t block_words,
                int64_t pair_words, uint32_t* to) {
  alignas(64) static const T zeros[16] = {};
  for (int pair = 0; pair < kKeyTile / 2; ++pair, to += pair_words) {
    const int even = 2 * pair, odd = even + 1;
    const bool has_even = begin <= even && even < end, has_odd = begin <= odd && odd < end;
    const T* a = has_even ? reinterpret_cast<const T*>(values + even * stride) : zeros;
    const T* b = has_odd ? reinterpret_cast<const T*>(values + odd * stride) : zeros;
    const int64_t step_a = has_even ? 16 : 0, step_b = has_odd ? 16 : 0;
    uint32_t* at = to;
    for (int64_t d = 0; d < dims; d += 16, a += step_a, b += step_b, at += block_words) {
      _mm512_storeu_si512(at, _mm512_or_si512(Bf16Words(a), _mm512_slli_epi32(Bf16Words(b), 16)));
    }
  }
}

#endif

}  // namespace
}  // namespace penstock
