// The products of attention_products.h on AMX tiles: [16 keys, 32 dims] of the cache as it lies times [16 pairs of
// dims, 16 columns] of queries, and [16 columns, 16 pairs of keys] of probabilities times [16 pairs of keys, 16 dims]
// of values.
#pragma once

#include "attention/attention_products.h"
#include "common/tiles.h"

#ifdef PENSTOCK_HAS_TILES
namespace penstock {
namespace {

// Byte offset of the dims of chunk c (32 of them): the last chunk of a dim that is no multiple of 32 overlaps the
// one before, and its queries are 0 where it does.
inline int64_t ChunkOffset(int64_t chunk, int64_t dim) { return 2 * (32 * chunk + 32 <= dim ? 32 * chunk : dim - 32); }

// Scores of kN tiles of keys against one tile of columns.
template <int kN>
void ScoreTiles(const char* const* keys, int64_t dim, const uint32_t* queries, float* scores, Fetch& fetch) {
  const int64_t stride = 2 * dim;
  TileZero<0>();
  if constexpr (kN > 1) TileZero<1>();
  if constexpr (kN > 2) TileZero<2>();
  if constexpr (kN > 3) TileZero<3>();
  for (int64_t c = 0; c * 32 < dim; ++c) {
    const int64_t at = ChunkOffset(c, dim);
    TileLoad<4>(queries + c * 256, 64);
    TileLoad<5>(keys[0] + at, stride);
    TileDotBf16<0, 5, 4>();
    if constexpr (kN > 1) {
      TileLoad<6>(keys[1] + at, stride);
      TileDotBf16<1, 6, 4>();
    }
    if constexpr (kN > 2) {
      TileLoad<7>(keys[2] + at, stride);
      TileDotBf16<2, 7, 4>();
    }
    if constexpr (kN > 3) {
      TileLoad<5>(keys[3] + at, stride);
      TileDotBf16<3, 5, 4>();
    }
    fetch.Some();
  }
  TileStore<0>(scores, 64);
  if constexpr (kN > 1) TileStore<1>(scores + 256, 64);
  if constexpr (kN > 2) TileStore<2>(scores + 512, 64);
  if constexpr (kN > 3) TileStore<3>(scores + 768, 64);
}

// The same for kN (1 or 2) tiles of keys against two tiles of columns, `apart` words of queries from each other and
// kSplit keys of scores: keys, which come from L2, are loaded half as often.
template <int kN>
void ScoreTilesTwice(const char* const* keys, int64_t dim, const uint32_t* queries, int64_t apart, float* scores,
                     Fetch& fetch) {
  const int64_t stride = 2 * dim;
  TileZero<0>();
  TileZero<1>();
  if constexpr (kN > 1) TileZero<2>();
  if constexpr (kN > 1) TileZero<3>();
  for (int64_t c = 0; c * 32 < dim; ++c) {
    const int64_t at = ChunkOffset(c, dim);
    TileLoad<4>(keys[0] + at, stride);
    TileLoad<6>(queries + c * 256, 64);
    TileDotBf16<0, 4, 6>();
    TileLoad<7>(queries + apart + c * 256, 64);
    TileDotBf16<1, 4, 7>();
    if constexpr (kN > 1) {
      TileLoad<5>(keys[1] + at, stride);
      TileDotBf16<2, 5, 6>();
      TileDotBf16<3, 5, 7>();
    }
    fetch.Some();
  }
  TileStore<0>(scores, 64);
  TileStore<1>(scores + kSplit * kCols, 64);
  if constexpr (kN > 1) TileStore<2>(scores + 256, 64);
  if constexpr (kN > 1) TileStore<3>(scores + kSplit * kCols + 256, 64);
}

// out[col][dim ..] for kN times 16 dims: sum over blocks of 32 keys [begin, end). Values are tiles
// [block][dims / 16][16 pairs][16 dims].
template <int kN>
void SumTiles(const uint32_t* probabilities, const uint32_t* values, int begin, int end, int64_t dims, int64_t dim,
              float* out, Fetch& fetch) {
  TileZero<0>();
  if constexpr (kN > 1) TileZero<1>();
  if constexpr (kN > 2) TileZero<2>();
  if constexpr (kN > 3) TileZero<3>();
  for (int block = begin; block < end; ++block) {
    const uint32_t* value = values + (block * dims + dim) * 16;
    TileLoad<4>(probabilities + block * 256, 64);
    TileLoad<5>(value, 64);
    TileDotBf16<0, 4, 5>();
    if constexpr (kN > 1) {
      TileLoad<6>(value + 256, 64);
      TileDotBf16<1, 4, 6>();
    }
    if constexpr (kN > 2) {
      TileLoad<7>(value + 512, 64);
      TileDotBf16<2, 4, 7>();
    }
    if constexpr (kN > 3) {
      TileLoad<5>(value + 768, 64);
      TileDotBf16<3, 4, 5>();
    }
    fetch.Some();
  }
  TileStore<0>(out + dim, 4 * dims);
  if constexpr (kN > 1) TileStore<1>(out + dim + 16, 4 * dims);
  if constexpr (kN > 2) TileStore<2>(out + dim + 32, 4 * dims);
  if constexpr (kN > 3) TileStore<3>(out + dim + 48, 4 * dims);
}

// The same for kN (1 or 2) times 16 dims of two tiles of columns, kSplit keys of probabilities from each other.
template <int kN>
void SumTilesTwice(const uint32_t* probabilities, const uint32_t* values, int begin, int end, int64_t dims, int64_t dim,
                   float* out, float* out2, Fetch& fetch) {
  TileZero<0>();
  TileZero<1>();
  if constexpr (kN > 1) TileZero<2>();
  if constexpr (kN > 1) TileZero<3>();
  for (int block = begin; block < end; ++block) {
    const uint32_t* value = values + (block * dims + dim) * 16;
    TileLoad<4>(probabilities + block * 256, 64);
    TileLoad<6>(value, 64);
    TileDotBf16<0, 4, 6>();
    TileLoad<5>(probabilities + (kSplit / 32 + block) * 256, 64);
    TileDotBf16<1, 5, 6>();
    if constexpr (kN > 1) {
      TileLoad<7>(value + 256, 64);
      TileDotBf16<2, 4, 7>();
      TileDotBf16<3, 5, 7>();
    }
    fetch.Some();
  }
  TileStore<0>(out + dim, 4 * dims);
  TileStore<1>(out2 + dim, 4 * dims);
  if constexpr (kN > 1) TileStore<2>(out + dim + 16, 4 * dims);
  if constexpr (kN > 1) TileStore<3>(out2 + dim + 16, 4 * dims);
}

}  // namespace
}  // namespace penstock
#endif
