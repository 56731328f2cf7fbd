// Makes tiles of bf16 of a part of a block with small floats, so that the kernels for bf16 can multiply it.
//
// The part lies in a cache until it is multiplied; only the codes come from memory. A value of E2M1 times its scale,
// which is a power of two, is exact in bf16. One of E4M3 times its float32 scale is rounded to bf16, as it would be if
// the weight were made bf16 when it is loaded.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "common/lanes.h"
#include "linear/linear.h"

namespace penstock {
namespace {

constexpr int64_t kExpandAhead = 2048;  // how many bytes ahead codes are prefetched

// The values of codes of E2M1 (the lower half of each byte of `codes`) as bf16: those of the first 8 bytes of each 16
// in rows[0], and of the others in rows[1].
inline void ValuesOfE2m1(__m256i codes, __m256i* rows) {
  const __m256i low = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0x00, 0x00, char(0x80), char(0xc0), 0x00, 0x40, char(0x80), char(0xc0),  //
                    0x00, 0x00, char(0x80), char(0xc0), 0x00, 0x40, char(0x80), char(0xc0)));
  const __m256i high = _mm256_broadcastsi128_si256(_mm_setr_epi8(0x00, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,  //
                                                                 char(0x80), char(0xbf), char(0xbf), char(0xbf),
                                                                 char(0xc0), char(0xc0), char(0xc0), char(0xc0)));
  const __m256i of_low = _mm256_shuffle_epi8(low, codes), of_high = _mm256_shuffle_epi8(high, codes);
  rows[0] = _mm256_unpacklo_epi8(of_low, of_high);
  rows[1] = _mm256_unpackhi_epi8(of_low, of_high);
}

// Multiplies values of E2M1 in bf16 by powers of two, given as what is added to their bits; 0 stays 0.
inline __m256i TimesPowers(__m256i values, __m256i added) {
  const __m256i sizes = _mm256_and_si256(values, _mm256_set1_epi16(0x7fff));
  return _mm256_add_epi16(values, _mm256_and_si256(added, _mm256_cmpgt_epi16(sizes, _mm256_setzero_si256())));
}

// A tile of 64 inputs: the scales [2 groups][16 outputs], a byte b for 2^(b - 127), then eight lines of codes. A line
// has four rows of a tile of bf16: byte 16 q + t has values 8 q + t of the first and the third row, if t < 8, or else
// values 8 q + t - 8 of the second and the fourth.
inline void ExpandE2m1(const char* tile, char* to) {
  const char* codes = tile + 2 * kBlockOut;
  for (int group = 0; group < 2; ++group) {
    // Each output has two values in a row, which have the same scale.
    const __m128i scales = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tile) + group);
    __m256i added[2];
    for (int half = 0; half < 2; ++half) {
      const __m128i of_half = half == 0 ? scales : _mm_srli_si128(scales, 8);
      const __m256i exponents = _mm256_sub_epi32(_mm256_cvtepu8_epi32(of_half), _mm256_set1_epi32(127));
      const __m256i one = _mm256_and_si256(_mm256_slli_epi32(exponents, 7), _mm256_set1_epi32(0xffff));
      added[half] = _mm256_or_si256(one, _mm256_slli_epi32(one, 16));
    }
    for (int line = 0; line < 4; ++line, codes += kLine, to += 4 * kLine) {
      _mm_prefetch(codes + kExpandAhead, _MM_HINT_T0);
      for (int half = 0; half < 2; ++half) {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes) + half);
        const __m256i fifteen = _mm256_set1_epi8(15);
        __m256i rows[4];
        ValuesOfE2m1(_mm256_and_si256(both, fifteen), rows);
        ValuesOfE2m1(_mm256_and_si256(_mm256_srli_epi16(both, 4), fifteen), rows + 2);
        for (int row = 0; row < 4; ++row) {
          auto* out = reinterpret_cast<__m256i*>(to + row * kLine) + half;
          _mm256_store_si256(out, TimesPowers(rows[row], added[half]));
        }
      }
    }
  }
}

// `pairs` rows of a tile, each with the codes [16 outputs][2 inputs]; `scales` are those of the outputs.
inline void ExpandE4m3(const char* codes, const float* scales, int64_t pairs, char* to) {
  constexpr float kOfLoad = 256.0f;  // LoadE4m3 gives so many times less
  float doubled[2 * kBlockOut];
  for (int64_t i = 0; i < 2 * kBlockOut; ++i) {
    doubled[i] = scales[i / 2] * kOfLoad;
  }
  const Lanes first = Load(doubled), second = Load(doubled + kBlockOut);
  auto* from = reinterpret_cast<const uint8_t*>(codes);
  auto* out = reinterpret_cast<uint16_t*>(to);
  for (int64_t pair = 0; pair < pairs; ++pair, from += 2 * kBlockOut, out += 2 * kBlockOut) {
    _mm_prefetch(reinterpret_cast<const char*>(from) + kExpandAhead, _MM_HINT_T0);
    StoreBf16(out, Mul(LoadE4m3(from), first));
    StoreBf16(out + kBlockOut, Mul(LoadE4m3(from + kBlockOut), second));
  }
}

// Writes the tiles of inputs [begin, end) of a block with k inputs to `to`, which is aligned to a line; both are
// multiples of InputsAtOnce.
inline void Expand(Format format, const char* block, int64_t k, int64_t begin, int64_t end, char* to) {
  constexpr int64_t kPairBytes = 2 * kBlockOut;
  switch (format) {
    case Format::kE2m1:
      for (int64_t i = begin; i < end; i += 2 * kGroup, to += 2 * kGroup * kPairBytes) {
        ExpandE2m1(block + BytesOfBlock(format, i), to);
      }
      return;
    case Format::kE4m3Groups:
      for (int64_t i = begin; i < end; i += kWide, to += kWide * kPairBytes) {
        const char* codes = block + BytesOfBlock(format, i);
        const char* scales = codes + kWide * kBlockOut;
        ExpandE4m3(codes, reinterpret_cast<const float*>(scales), kWide / 2, to);
      }
      return;
    case Format::kE4m3:
      ExpandE4m3(block + begin * kBlockOut, reinterpret_cast<const float*>(block + k * kBlockOut), (end - begin) / 2,
                 to);
      return;
    default:
      return;  // the others are multiplied as they are
  }
}

}  // namespace
}  // namespace penstock
