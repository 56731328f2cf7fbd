// The products of attention_products.h on AMX tiles: [16 keys, 32 dims], as they lie in the cache, times [16 pairs of
// dims, 16 columns] of queries; and [16 columns, 16 pairs of keys] of probabilities times [16 pairs of keys, 16 dims]
// of values.
#pragma once

#include "attention/attention_products.h"
#include "common/tiles.h"
#include "common/vec.h"

namespace penstock {
namespace {

// Byte offset of the dims of chunk c (32 of them). If dim is not a multiple of 32, the last chunk overlaps the one
// before it, and its queries are 0 there.
inline int64_t ChunkOffset(int64_t chunk, int64_t dim) { return 2 * (32 * chunk + 32 <= dim ? 32 * chunk : dim - 32); }

}  // namespace
}  // namespace penstock

#ifdef PENSTOCK_HAS_TILES
#include "attention/attention_numbers_avx512.h"

namespace penstock {
namespace {

// Sixteen int8 as bf16, in the low halves of words.
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

// Rounds two vectors to bf16 and stores them side by side in words.
inline void StorePair(uint32_t* to, Vec::F even, Vec::F odd) {
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(order), both));
}

// The tile registers of the functions below. Sums are numbered by tiles of keys or dims. If there are two tiles of
// columns, kSum0 and kSum1 belong to the first tile of keys or dims, and kSum2 and kSum3 to the second.
constexpr int kSum0 = 0;
constexpr int kSum1 = 1;
constexpr int kSum2 = 2;
constexpr int kSum3 = 3;
// Operands; each function says what they hold.
constexpr int kOperand0 = 4;
constexpr int kOperand1 = 5;
constexpr int kOperand2 = 6;
constexpr int kOperand3 = 7;

// Computes the scores of kN tiles of keys against one tile of columns.
template <int kN>
void ScoreTiles(const char* const* keys, int64_t dim, const uint32_t* queries, float* scores, Fetch& fetch) {
  constexpr int kQueries = kOperand0;
  constexpr int kKeysA = kOperand1;
  constexpr int kKeysB = kOperand2;
  constexpr int kKeysC = kOperand3;
  const int64_t stride = 2 * dim;
  TileZero<kSum0>();
  if constexpr (kN > 1) {
    TileZero<kSum1>();
  }
  if constexpr (kN > 2) {
    TileZero<kSum2>();
  }
  if constexpr (kN > 3) {
    TileZero<kSum3>();
  }
  for (int64_t c = 0; c * 32 < dim; ++c) {
    const int64_t at = ChunkOffset(c, dim);
    TileLoad<kQueries>(queries + c * 256, 64);
    TileLoad<kKeysA>(keys[0] + at, stride);
    TileDotBf16<kSum0, kKeysA, kQueries>();
    if constexpr (kN > 1) {
      TileLoad<kKeysB>(keys[1] + at, stride);
      TileDotBf16<kSum1, kKeysB, kQueries>();
    }
    if constexpr (kN > 2) {
      TileLoad<kKeysC>(keys[2] + at, stride);
      TileDotBf16<kSum2, kKeysC, kQueries>();
    }
    if constexpr (kN > 3) {
      TileLoad<kKeysA>(keys[3] + at, stride);
      TileDotBf16<kSum3, kKeysA, kQueries>();
    }
    fetch.Advance();
  }
  TileStore<kSum0>(scores, 64);
  if constexpr (kN > 1) {
    TileStore<kSum1>(scores + 256, 64);
  }
  if constexpr (kN > 2) {
    TileStore<kSum2>(scores + 512, 64);
  }
  if constexpr (kN > 3) {
    TileStore<kSum3>(scores + 768, 64);
  }
}

// Computes the scores of kN (1 or 2) tiles of keys against two tiles of columns, whose queries lie `apart` words from
// each other and whose scores lie kSplit keys from each other. So keys, which come from the second-level cache, are
// loaded half as often.
template <int kN>
void ScoreTilesTwice(const char* const* keys, int64_t dim, const uint32_t* queries, int64_t apart, float* scores,
                     Fetch& fetch) {
  constexpr int kKeys0 = kOperand0;
  constexpr int kKeys1 = kOperand1;
  constexpr int kQueries0 = kOperand2;
  constexpr int kQueries1 = kOperand3;
  const int64_t stride = 2 * dim;
  TileZero<kSum0>();
  TileZero<kSum1>();
  if constexpr (kN > 1) {
    TileZero<kSum2>();
  }
  if constexpr (kN > 1) {
    TileZero<kSum3>();
  }
  for (int64_t c = 0; c * 32 < dim; ++c) {
    const int64_t at = ChunkOffset(c, dim);
    TileLoad<kKeys0>(keys[0] + at, stride);
    TileLoad<kQueries0>(queries + c * 256, 64);
    TileDotBf16<kSum0, kKeys0, kQueries0>();
    TileLoad<kQueries1>(queries + apart + c * 256, 64);
    TileDotBf16<kSum1, kKeys0, kQueries1>();
    if constexpr (kN > 1) {
      TileLoad<kKeys1>(keys[1] + at, stride);
      TileDotBf16<kSum2, kKeys1, kQueries0>();
      TileDotBf16<kSum3, kKeys1, kQueries1>();
    }
    fetch.Advance();
  }
  TileStore<kSum0>(scores, 64);
  TileStore<kSum1>(scores + kSplit * kCols, 64);
  if constexpr (kN > 1) {
    TileStore<kSum2>(scores + 256, 64);
  }
  if constexpr (kN > 1) {
    TileStore<kSum3>(scores + kSplit * kCols + 256, 64);
  }
}

// out[col][dim ..] for kN times 16 dims: the sum over blocks of 32 keys [begin, end). Values are tiles
// [block][dims / 16][16 pairs][16 dims].
template <int kN>
void SumTiles(const uint32_t* probabilities, const uint32_t* values, int begin, int end, int64_t dims, int64_t dim,
              float* out, Fetch& fetch) {
  constexpr int kProbabilities = kOperand0;
  constexpr int kValuesA = kOperand1;
  constexpr int kValuesB = kOperand2;
  constexpr int kValuesC = kOperand3;
  TileZero<kSum0>();
  if constexpr (kN > 1) {
    TileZero<kSum1>();
  }
  if constexpr (kN > 2) {
    TileZero<kSum2>();
  }
  if constexpr (kN > 3) {
    TileZero<kSum3>();
  }
  for (int block = begin; block < end; ++block) {
    const uint32_t* value = values + (block * dims + dim) * 16;
    TileLoad<kProbabilities>(probabilities + block * 256, 64);
    TileLoad<kValuesA>(value, 64);
    TileDotBf16<kSum0, kProbabilities, kValuesA>();
    if constexpr (kN > 1) {
      TileLoad<kValuesB>(value + 256, 64);
      TileDotBf16<kSum1, kProbabilities, kValuesB>();
    }
    if constexpr (kN > 2) {
      TileLoad<kValuesC>(value + 512, 64);
      TileDotBf16<kSum2, kProbabilities, kValuesC>();
    }
    if constexpr (kN > 3) {
      TileLoad<kValuesA>(value + 768, 64);
      TileDotBf16<kSum3, kProbabilities, kValuesA>();
    }
    fetch.Advance();
  }
  TileStore<kSum0>(out + dim, 4 * dims);
  if constexpr (kN > 1) {
    TileStore<kSum1>(out + dim + 16, 4 * dims);
  }
  if constexpr (kN > 2) {
    TileStore<kSum2>(out + dim + 32, 4 * dims);
  }
  if constexpr (kN > 3) {
    TileStore<kSum3>(out + dim + 48, 4 * dims);
  }
}

// SumTiles for kN (1 or 2) times 16 dims and two tiles of columns, whose probabilities lie kSplit keys from each other.
template <int kN>
void SumTilesTwice(const uint32_t* probabilities, const uint32_t* values, int begin, int end, int64_t dims, int64_t dim,
                   float* out, float* out2, Fetch& fetch) {
  constexpr int kProbabilities0 = kOperand0;
  constexpr int kProbabilities1 = kOperand1;
  constexpr int kValues0 = kOperand2;
  constexpr int kValues1 = kOperand3;
  TileZero<kSum0>();
  TileZero<kSum1>();
  if constexpr (kN > 1) {
    TileZero<kSum2>();
  }
  if constexpr (kN > 1) {
    TileZero<kSum3>();
  }
  for (int block = begin; block < end; ++block) {
    const uint32_t* value = values + (block * dims + dim) * 16;
    TileLoad<kProbabilities0>(probabilities + block * 256, 64);
    TileLoad<kValues0>(value, 64);
    TileDotBf16<kSum0, kProbabilities0, kValues0>();
    TileLoad<kProbabilities1>(probabilities + (kSplit / 32 + block) * 256, 64);
    TileDotBf16<kSum1, kProbabilities1, kValues0>();
    if constexpr (kN > 1) {
      TileLoad<kValues1>(value + 256, 64);
      TileDotBf16<kSum2, kProbabilities0, kValues1>();
      TileDotBf16<kSum3, kProbabilities1, kValues1>();
    }
    fetch.Advance();
  }
  TileStore<kSum0>(out + dim, 4 * dims);
  TileStore<kSum1>(out2 + dim, 4 * dims);
  if constexpr (kN > 1) {
    TileStore<kSum2>(out + dim + 16, 4 * dims);
  }
  if constexpr (kN > 1) {
    TileStore<kSum3>(out2 + dim + 16, 4 * dims);
  }
}

}  // namespace
}  // namespace penstock
#endif
