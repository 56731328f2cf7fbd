// The two products of attention for one split and one tile of query columns: scores = K Q^T and values = P^T V.
//
// Operands are rows of 32-bit words, one word per column: a float, or a pair of bf16 that belong together in a dot
// product (two dims of a query, or two keys of a probability). So vector code and AMX share their forms:
//   queries [words of dim][kCols], scores float[key][kCols], probabilities [words of key][kCols],
//   values [words of key][dim]. Keys are read where they lie in the cache.
#pragma once

#include <cstring>

#include "attention.h"
#include "attention_vec.h"

namespace penstock {
namespace {

// How numbers are multiplied: as float32; bf16 widened to float32 first; pairs of bf16 by vector instructions; or
// by AMX tiles.
enum class Form { kFloat, kWiden, kPairs, kTiles };

// Prefetches tiles of keys or values bit by bit while others are used: memory is the limit of decoding, and requests
// must neither stop nor come all at once.
class Fetch {
 public:
  // `bytes` of each tile that is not null, in about `steps` calls of Some.
  Fetch(const char* const* tiles, int64_t bytes, int64_t steps) : bytes_(bytes) {
    for (int i = 0; i < kSplitTiles; ++i)
      if (tiles && tiles[i]) tiles_[count_++] = tiles[i];
    left_ = count_ * bytes;
    step_ = steps > 0 ? (left_ / steps + 64) & -64 : left_;
  }
  void Some() {
    if (left_ <= 0) return;
    left_ -= step_;
    for (int64_t i = 0; i < step_ && tile_ < count_; i += 64) {
      _mm_prefetch(tiles_[tile_] + at_, _MM_HINT_T1);
      at_ += 64;
      if (at_ >= bytes_) at_ = 0, ++tile_;
    }
  }

 private:
  const char* tiles_[kSplitTiles];
  int count_ = 0, tile_ = 0;
  int64_t bytes_, at_ = 0, left_, step_;
};

constexpr bool Paired(Form form) { return form == Form::kPairs || form == Form::kTiles; }

template <bool kPair>
inline Vec::F DotStep(Vec::F sum, Vec::F a, float broadcast) {
#ifdef __AVX512BF16__
  if constexpr (kPair) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)_mm512_set1_ps(broadcast));
  }
#endif
  return Vec::Fma(a, Vec::Set(broadcast), sum);
}

inline float Word(const char* p) {
  float word;
  memcpy(&word, p, 4);
  return word;
}

// Scores of kKeyTile keys, rows of `words` words `row_bytes` apart, against kVecs vectors of columns.
template <int kVecs, bool kPair>
void ScoreKeys(const char* keys, int64_t row_bytes, const float* queries, int64_t words, float* scores) {
  constexpr int kKeys = kVecs == 1 ? 8 : 4;
  for (int first = 0; first < kKeyTile; first += kKeys, keys += kKeys * row_bytes) {
    Vec::F sum[kKeys][kVecs];
    for (auto& key : sum)
      for (auto& s : key) s = Vec::Set(0.0f);
    for (int64_t w = 0; w < words; ++w) {
      Vec::F q[kVecs];
      for (int v = 0; v < kVecs; ++v) q[v] = Vec::Load(queries + w * kCols + v * Vec::kWidth);
      for (int k = 0; k < kKeys; ++k) {
        const float word = Word(keys + k * row_bytes + w * 4);
        for (int v = 0; v < kVecs; ++v) sum[k][v] = DotStep<kPair>(sum[k][v], q[v], word);
      }
    }
    for (int k = 0; k < kKeys; ++k)
      for (int v = 0; v < kVecs; ++v) Vec::Store(scores + (first + k) * kCols + v * Vec::kWidth, sum[k][v]);
  }
}

// Rows of words of the split's values; a tile of keys has kRows of them.
struct ValueRows {
  const char* const* tiles;
  int64_t row_bytes;
  int rows_per_tile;
  int begin, end;  // only these rows are read
};

// out[col][dim..] = sum over rows of probability[row][col] * value[row][dim..], for kC columns and kV vectors.
template <int kC, int kV, bool kPair>
void SumBlock(const ValueRows& rows, const float* probabilities, int64_t dim, int64_t out_stride, float* out) {
  Vec::F sum[kC][kV];
  for (auto& col : sum)
    for (auto& s : col) s = Vec::Set(0.0f);
  for (int row = rows.begin; row < rows.end;) {
    const int tile = row / rows.rows_per_tile;
    const int stop = rows.end < (tile + 1) * rows.rows_per_tile ? rows.end : (tile + 1) * rows.rows_per_tile;
    const char* value = rows.tiles[tile] + (row - tile * rows.rows_per_tile) * rows.row_bytes + dim * 4;
    for (; row < stop; ++row, value += rows.row_bytes) {
      Vec::F v[kV];
      for (int i = 0; i < kV; ++i) v[i] = Vec::Load(reinterpret_cast<const float*>(value) + i * Vec::kWidth);
      for (int c = 0; c < kC; ++c) {
        const float p = probabilities[row * kCols + c];
        for (int i = 0; i < kV; ++i) sum[c][i] = DotStep<kPair>(sum[c][i], v[i], p);
      }
    }
  }
  for (int c = 0; c < kC; ++c)
    for (int i = 0; i < kV; ++i) Vec::Store(out + c * out_stride + dim + i * Vec::kWidth, sum[c][i]);
}

template <int kC, bool kPair>
void SumColumns(const ValueRows& rows, const float* probabilities, int64_t dims, float* out) {
  int64_t dim = 0;
  for (; dim + 4 * Vec::kWidth <= dims; dim += 4 * Vec::kWidth) {
    SumBlock<kC, 4, kPair>(rows, probabilities, dim, dims, out);
  }
  for (; dim < dims; dim += Vec::kWidth) SumBlock<kC, 1, kPair>(rows, probabilities, dim, dims, out);
}

// out float[kCols][dims], of which `cols` are filled.
template <bool kPair>
void SumValues(const ValueRows& rows, const float* probabilities, int cols, int64_t dims, float* out) {
  constexpr int kBlock = Vec::kWidth == 16 ? 4 : 2;  // what the registers hold
  int c = 0;
  for (; c + kBlock <= cols; c += kBlock) SumColumns<kBlock, kPair>(rows, probabilities + c, dims, out + c * dims);
  if (kBlock > 2 && c + 2 <= cols) {
    SumColumns<2, kPair>(rows, probabilities + c, dims, out + c * dims);
    c += 2;
  }
  for (; c < cols; ++c) SumColumns<1, kPair>(rows, probabilities + c, dims, out + c * dims);
}

inline void WidenKeys(const char* from, int64_t count, float* to) {
  const auto* bits = reinterpret_cast<const uint16_t*>(from);
  for (int64_t i = 0; i < count; i += Vec::kWidth) Vec::Store(to + i, Vec::Widen(bits + i));
}

#ifdef __AVX512BF16__
// Values [16 keys][dims] to pairs of keys [8][dims][2], where 16 dims begin every `block_words` words and pairs every
// `pair_words`. Keys outside [begin, end) become 0 unread: they may be NaN.
inline void PairValues(const char* values, int64_t dims, int begin, int end, int64_t block_words, int64_t pair_words,
                       uint32_t* to) {
  alignas(64) static const uint16_t zeros[16] = {};
  const auto* bits = reinterpret_cast<const uint16_t*>(values);
  for (int pair = 0; pair < kKeyTile / 2; ++pair, to += pair_words) {
    const int even = 2 * pair, odd = even + 1;
    const bool has_even = begin <= even && even < end, has_odd = begin <= odd && odd < end;
    const uint16_t* a = has_even ? bits + even * dims : zeros;
    const uint16_t* b = has_odd ? bits + odd * dims : zeros;
    const int64_t step_a = has_even ? 16 : 0, step_b = has_odd ? 16 : 0;
    uint32_t* at = to;
    for (int64_t d = 0; d < dims; d += 16, a += step_a, b += step_b, at += block_words) {
      const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)));
      const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
      _mm512_storeu_si512(at, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
}

inline void StorePair(uint32_t* to, Vec::F even, Vec::F odd) {
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(order), both));
}
#endif

#ifdef __AMX_BF16__
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
    const __m512i low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x44), low2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x44);
    const __m512i high = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xee), high2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xee);
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
              float* out) {
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
  }
  _tile_stored(0, out + dim, 4 * dims);
  if constexpr (kN > 1) _tile_stored(1, out + dim + 16, 4 * dims);
  if constexpr (kN > 2) _tile_stored(2, out + dim + 32, 4 * dims);
  if constexpr (kN > 3) _tile_stored(3, out + dim + 48, 4 * dims);
}

// The same for kN (1 or 2) times 16 dims of two tiles of columns, kSplit keys of probabilities from each other.
template <int kN>
void SumTilesTwice(const uint32_t* probabilities, const uint32_t* values, int begin, int end, int64_t dims, int64_t dim,
                   float* out, float* out2) {
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
  }
  _tile_stored(0, out + dim, 4 * dims);
  _tile_stored(1, out2 + dim, 4 * dims);
  if constexpr (kN > 1) _tile_stored(2, out + dim + 16, 4 * dims);
  if constexpr (kN > 1) _tile_stored(3, out2 + dim + 16, 4 * dims);
}
#endif

}  // namespace
}  // namespace penstock
