// The products of attention_products.h on AMX tiles: [16 keys, 32 dims] of the cache as it lies times [16 pairs of
// dims, 16 columns] of queries, and [16 columns, 16 pairs of keys] of probabilities times [16 pairs of keys, 16 dims]
// of values.
#pragma once

#include "attention_products.h"

#ifdef __AMX_BF16__
namespace penstock {
namespace {

// 16 x 16 words transposed, as between probability pairs [pair][col] and AMX's A operand [col][pair].
inline void Transpose(const uint32_t* const* from, uint32_t* to) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(from[i]);
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
  // a[4 i + j] lane l holds word 4 l + j of rows 4 i .. 4 i + 3.
  for (int j = 0; j < 4; ++j) {
    const __m512i low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x44);
    const __m512i low2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x44);
    const __m512i high = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xee);
    const __m512i high2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xee);
    _mm512_storeu_si512(to + 16 * j, _mm512_shuffle_i32x4(low, low2, 0x88));
    _mm512_storeu_si512(to + 16 * (4 + j), _mm512_shuffle_i32x4(low, low2, 0xdd));
    _mm512_storeu_si512(to + 16 * (8 + j), _mm512_shuffle_i32x4(high, high2, 0x88));
    _mm512_storeu_si512(to + 16 * (12 + j), _mm512_shuffle_i32x4(high, high2, 0xdd));
  }
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Byte offset of the dims of chunk c (32 of them): the last chunk of a dim that is no multiple of 32 overlaps the
// one before, and its queries are 0 where it does.
inline int64_t ChunkOffset(int64_t chunk, int64_t dim) { return 2 * (32 * chunk + 32 <= dim ? 32 * chunk : dim - 32); }

// Scores of kN tiles of keys against one tile of columns.
template <int kN>
void ScoreTiles(const char* const* keys, int64_t dim, const uint32_t* queries, float* scores, Fetch& fetch) {
  const int64_t stride = 2 * dim;
  _tile_zero(0);
  if constexpr (kN > 1) _tile_zero(1);
  if constexpr (kN > 2) _tile_zero(2);
  if constexpr (kN > 3) _tile_zero(3);
  for (int64_t c = 0; c * 32 < dim; ++c) {
    const int64_t at = ChunkOffset(c, dim);
    _tile_loadd(4, queries + c * 256, 64);
    _tile_loadd(5, keys[0] + at, stride);
    _tile_dpbf16ps(0, 5, 4);
    if constexpr (kN > 1) {
      _tile_loadd(6, keys[1] + at, stride);
      _tile_dpbf16ps(1, 6, 4);
    }
    if constexpr (kN > 2) {
      _tile_loadd(7, keys[2] + at, stride);
      _tile_dpbf16ps(2, 7, 4);
    }
    if constexpr (kN > 3) {
      _tile_loadd(5, keys[3] + at, stride);
      _tile_dpbf16ps(3, 5, 4);
    }
    fetch.Some();
  }
  _tile_stored(0, scores, 64);
  if constexpr (kN > 1) _tile_stored(1, scores + 256, 64);
  if constexpr (kN > 2) _tile_stored(2, scores + 512, 64);
  if constexpr (kN > 3) _tile_stored(3, scores + 768, 64);
}

// The same for kN (1 or 2) tiles of keys against two tiles of columns, `apart` words of queries from each other and
// kSplit keys of scores: keys, which come from L2, are loaded half as often.
template <int kN>
void ScoreTilesTwice(const char* const* keys, int64_t dim, const uint32_t* queries, int64_t apart, float* scores,
                     Fetch& fetch) {
  const int64_t stride = 2 * dim;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kN > 1) _tile_zero(2);
  if constexpr (kN > 1) _tile_zero(3);
  for (int64_t c = 0; c * 32 < dim; ++c) {
    const int64_t at = ChunkOffset(c, dim);
    _tile_loadd(4, keys[0] + at, stride);
    _tile_loadd(6, queries + c * 256, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, queries + apart + c * 256, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kN > 1) {
      _tile_loadd(5, keys[1] + at, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    fetch.Some();
  }
  _tile_stored(0, scores, 64);
  _tile_stored(1, scores + kSplit * kCols, 64);
  if constexpr (kN > 1) _tile_stored(2, scores + 256, 64);
  if constexpr (kN > 1) _tile_stored(3, scores + kSplit * kCols + 256, 64);
}

// out[col][dim ..] for kN times 16 dims: sum over blocks of 32 keys [begin, end). Values are tiles
// [block][dims / 16][16 pairs][16 dims].
template <int kN>
void SumTiles(const uint32_t* probabilities, const uint32_t* values, int begin, int end, int64_t dims, int64_t dim,
              float* out, Fetch& fetch) {
  _tile_zero(0);
  if constexpr (kN > 1) _tile_zero(1);
  if constexpr (kN > 2) _tile_zero(2);
  if constexpr (kN > 3) _tile_zero(3);
  for (int block = begin; block < end; ++block) {
    const uint32_t* value = values + (block * dims + dim) * 16;
    _tile_loadd(4, probabilities + block * 256, 64);
    _tile_loadd(5, value, 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kN > 1) {
      _tile_loadd(6, value + 256, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (kN > 2) {
      _tile_loadd(7, value + 512, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (kN > 3) {
      _tile_loadd(5, value + 768, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
    fetch.Some();
  }
  _tile_stored(0, out + dim, 4 * dims);
  if constexpr (kN > 1) _tile_stored(1, out + dim + 16, 4 * dims);
  if constexpr (kN > 2) _tile_stored(2, out + dim + 32, 4 * dims);
  if constexpr (kN > 3) _tile_stored(3, out + dim + 48, 4 * dims);
}

// The same for kN (1 or 2) times 16 dims of two tiles of columns, kSplit keys of probabilities from each other.
template <int kN>
void SumTilesTwice(const uint32_t* probabilities, const uint32_t* values, int begin, int end, int64_t dims, int64_t dim,
                   float* out, float* out2, Fetch& fetch) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kN > 1) _tile_zero(2);
  if constexpr (kN > 1) _tile_zero(3);
  for (int block = begin; block < end; ++block) {
    const uint32_t* value = values + (block * dims + dim) * 16;
    _tile_loadd(4, probabilities + block * 256, 64);
    _tile_loadd(6, value, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, probabilities + (kSplit / 32 + block) * 256, 64);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (kN > 1) {
      _tile_loadd(7, value + 256, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    fetch.Some();
  }
  _tile_stored(0, out + dim, 4 * dims);
  _tile_stored(1, out2 + dim, 4 * dims);
  if constexpr (kN > 1) _tile_stored(2, out + dim + 16, 4 * dims);
  if constexpr (kN > 1) _tile_stored(3, out2 + dim + 16, 4 * dims);
}

}  // namespace
}  // namespace penstock
#endif
