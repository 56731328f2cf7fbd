// Transposes the words (32 bits) of up to 16 rows. In an unnamed namespace, like lanes.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace penstock {
namespace {

#if defined(__AVX512F__)

// Transposes 16 x 16 words in place.
inline void Transpose16(__m512i* a) {
  __m512i b[16];
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // Lane l of a[4 i + j] holds word 4 l + j of rows 4 i .. 4 i + 3.
  for (int j = 0; j < 4; ++j) {
    const __m512i low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x44);
    const __m512i low2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x44);
    const __m512i high = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xee);
    const __m512i high2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xee);
    b[j] = _mm512_shuffle_i32x4(low, low2, 0x88);
    b[4 + j] = _mm512_shuffle_i32x4(low, low2, 0xdd);
    b[8 + j] = _mm512_shuffle_i32x4(high, high2, 0x88);
    b[12 + j] = _mm512_shuffle_i32x4(high, high2, 0xdd);
  }
  for (int i = 0; i < 16; ++i) {
    a[i] = b[i];
  }
}

// The most rows of TransposeWords.
constexpr int64_t kTransposedRows = 16;

// Transposes from [rows][stride] to [words][rows]; there are at most 16 rows, and `words` is a multiple of 16.
inline void TransposeWords(const uint32_t* from, int64_t stride, int64_t rows, int64_t words, uint32_t* to) {
  const __mmask16 kept = static_cast<__mmask16>((1u << rows) - 1);
  const uint32_t* begins[16];
  for (int64_t r = 0; r < 16; ++r) {
    begins[r] = from + (r < rows ? r : 0) * stride;
  }
  for (int64_t w = 0; w < words; w += 16) {
    __m512i a[16];
    for (int64_t r = 0; r < 16; ++r) {
      a[r] = _mm512_loadu_si512(begins[r] + w);
    }
    Transpose16(a);
    for (int64_t i = 0; i < 16; ++i) {
      _mm512_mask_storeu_epi32(to + (w + i) * rows, kept, a[i]);
    }
  }
}

// Transposes 16 rows of 16 words, for example queries from [col][dim] to [dim][col].
inline void TransposeTile(const uint32_t* const* from, uint32_t* to) {
  __m512i a[16];
  for (int i = 0; i < 16; ++i) {
    a[i] = _mm512_loadu_si512(from[i]);
  }
  Transpose16(a);
  for (int i = 0; i < 16; ++i) {
    _mm512_storeu_si512(to + 16 * i, a[i]);
  }
}

#else

// Transposes 8 x 8 words: a[i] becomes word i of all rows.
inline void Transpose8(__m256* a) {
  __m256 b[8];
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  // Lane l of c[4 i + j] holds word 4 l + j of rows 4 i .. 4 i + 3.
  __m256 c[8];
  for (int i = 0; i < 8; i += 4) {
    c[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    c[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    c[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    c[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm256_permute2f128_ps(c[i], c[4 + i], 0x20);
    a[4 + i] = _mm256_permute2f128_ps(c[i], c[4 + i], 0x31);
  }
}

constexpr int64_t kTransposedRows = 8;

// As for AVX-512, but of at most 8 rows, and `words` is a multiple of 8. There is no quick store of some words of a
// register, so each row of the result is stored in a whole register, whose last words the next row overwrites; the last
// rows are put together elsewhere.
inline void TransposeWords(const uint32_t* from, int64_t stride, int64_t rows, int64_t words, uint32_t* to) {
  const float* begins[8];
  for (int64_t r = 0; r < 8; ++r) {
    begins[r] = reinterpret_cast<const float*>(from + (r < rows ? r : 0) * stride);
  }
  alignas(32) uint32_t last[8 * 8];
  for (int64_t w = 0; w < words; w += 8) {
    __m256 a[8];
    for (int64_t r = 0; r < 8; ++r) {
      a[r] = _mm256_loadu_ps(begins[r] + w);
    }
    Transpose8(a);
    uint32_t* out = w + 8 < words ? to + w * rows : last;
    for (int64_t i = 0; i < 8; ++i) {
      _mm256_storeu_ps(reinterpret_cast<float*>(out + i * rows), a[i]);
    }
  }
  memcpy(to + (words - 8) * rows, last, 8 * rows * 4);
}

// As for AVX-512.
inline void TransposeTile(const uint32_t* const* from, uint32_t* to) {
  for (int row = 0; row < 16; row += 8) {
    for (int word = 0; word < 16; word += 8) {
      __m256 a[8];
      for (int i = 0; i < 8; ++i) {
        a[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(from[row + i] + word));
      }
      Transpose8(a);
      for (int i = 0; i < 8; ++i) {
        _mm256_storeu_ps(reinterpret_cast<float*>(to + 16 * (word + i) + row), a[i]);
      }
    }
  }
}

#endif

}  // namespace
}  // namespace penstock
