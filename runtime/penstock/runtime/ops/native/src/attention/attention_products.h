// The two products of attention in float32 for one split and one tile of query columns, scores = K Q^T and
// values = P^T V, where a vector's lanes are columns (scores) or dims (values); and what all forms of multiplication
// share.
#pragma once

#include <cstring>

#include "attention/attention.h"
#include "common/common.h"
#include "common/vec.h"

namespace penstock {
namespace {

// How numbers are multiplied: as float32 by the functions of this file; as bf16 or int8 in place, by those of
// attention_lanes.h; or as bf16 by AMX tiles.
enum class Form { kFloat, kInPlace, kTiles };

// Prefetches tiles of keys or values little by little while other tiles are used. Memory bandwidth limits decoding, so
// prefetches must neither stop nor come all at once.
class Fetch {
 public:
  // Prefetches `bytes` of each tile that is not null, in `steps` calls of Advance.
  Fetch(const char* const* tiles, int64_t bytes, int64_t steps) : bytes_(bytes) {
    for (int i = 0; i < kSplitTiles; ++i) {
      if (tiles[i]) {
        tiles_[count_++] = tiles[i];
      }
    }
    step_ = steps > 0 ? (count_ * bytes / steps + 63) & -64 : 0;
  }
  // The next tile, for a caller that prefetches all of it, or `other` if there is none.
  const char* Tile(const char* other) { return tile_ < count_ ? tiles_[tile_++] : other; }
  // The first tile, or `other` if there is none. Some time after the first call of Tile it is in the second cache.
  const char* First(const char* other) const { return count_ > 0 ? tiles_[0] : other; }
  // How many bytes are left.
  int64_t Left() const { return (count_ - tile_) * bytes_ - at_; }
  void Advance() { Advance(step_); }
  void Advance(int64_t bytes) {
    for (int64_t i = 0; i < bytes && tile_ < count_; i += 64) {
      _mm_prefetch(tiles_[tile_] + at_, _MM_HINT_T1);
      at_ += 64;
      if (at_ >= bytes_) {
        at_ = 0, ++tile_;
      }
    }
  }

 private:
  const char* tiles_[kSplitTiles];
  int count_ = 0, tile_ = 0;
  int64_t bytes_, at_ = 0, step_;
};

inline float Word(const char* p) {
  float word;
  memcpy(&word, p, 4);
  return word;
}

// Computes the scores of kKeyTile keys, rows of `words` words that lie `row_bytes` apart, against kVecs vectors of
// columns.
template <int kVecs>
void ScoreKeys(const char* keys, int64_t row_bytes, const float* queries, int64_t words, float* scores) {
  constexpr int kKeys = (Vec::kWidth == 16 ? 16 : 8) / kVecs;  // half of the registers hold sums
  constexpr int kFour = 4;
  for (int first = 0; first < kKeyTile; first += kKeys, keys += kKeys * row_bytes) {
    Vec::F sum[kKeys][kVecs];
    for (auto& key : sum) {
      for (auto& s : key) {
        s = Vec::Set(0.0f);
      }
    }
    // One register for every four keys, which are so many multiples of row_bytes from it: GCC would take one for each
    // key, and lack some.
    const char* fours[kKeys / kFour];
    for (int i = 0; i < kKeys / kFour; ++i) {
      fours[i] = keys + i * kFour * row_bytes;
    }
    for (int64_t w = 0; w < words; ++w) {
      Vec::F q[kVecs];
      for (int v = 0; v < kVecs; ++v) {
        q[v] = Vec::Load(queries + w * kCols + v * Vec::kWidth);
      }
      for (int k = 0; k < kKeys; ++k) {
        const float word = Word(fours[k / kFour] + k % kFour * row_bytes);
        for (int v = 0; v < kVecs; ++v) {
          sum[k][v] = Vec::Fma(q[v], Vec::Set(word), sum[k][v]);
        }
      }
      for (auto& four : fours) {
        four += sizeof(float);
        __asm__("" : "+r"(four));
      }
    }
    for (int k = 0; k < kKeys; ++k) {
      for (int v = 0; v < kVecs; ++v) {
        Vec::Store(scores + (first + k) * kCols + v * Vec::kWidth, sum[k][v]);
      }
    }
  }
}

// The split's values as rows of float32, `row_bytes` apart; only those of keys [begin, end) are read.
struct ValueRows {
  const char* const* tiles;
  int64_t row_bytes;
  int begin, end;
};

// out[col][dim..] = sum over keys of probability[key][col] * value[key][dim..], for kC columns and kV vectors.
template <int kC, int kV>
void SumBlock(const ValueRows& rows, const float* probabilities, int64_t dim, int64_t out_stride, float* out) {
  Vec::F sum[kC][kV];
  for (auto& col : sum) {
    for (auto& s : col) {
      s = Vec::Set(0.0f);
    }
  }
  for (int key = rows.begin; key < rows.end;) {
    const int tile = key / kKeyTile, stop = Min(rows.end, (tile + 1) * kKeyTile);
    const char* value = rows.tiles[tile] + (key - tile * kKeyTile) * rows.row_bytes + dim * 4;
    for (; key < stop; ++key, value += rows.row_bytes) {
      Vec::F v[kV];
      for (int i = 0; i < kV; ++i) {
        v[i] = Vec::Load(reinterpret_cast<const float*>(value) + i * Vec::kWidth);
      }
      for (int c = 0; c < kC; ++c) {
        const Vec::F p = Vec::Set(probabilities[key * kCols + c]);
        for (int i = 0; i < kV; ++i) {
          sum[c][i] = Vec::Fma(v[i], p, sum[c][i]);
        }
      }
    }
  }
  for (int c = 0; c < kC; ++c) {
    for (int i = 0; i < kV; ++i) {
      Vec::Store(out + c * out_stride + dim + i * Vec::kWidth, sum[c][i]);
    }
  }
}

// Adds up kV vectors of dims of `cols` columns, kC columns at once as long as there are so many.
template <int kC, int kV>
void SumColumns(const ValueRows& rows, const float* probabilities, int cols, int64_t dim, int64_t dims, float* out) {
  for (; cols >= kC; cols -= kC, probabilities += kC, out += kC * dims) {
    SumBlock<kC, kV>(rows, probabilities, dim, dims, out);
  }
  if constexpr (kC > 1) {
    SumColumns<kC / 2, kV>(rows, probabilities, cols, dim, dims, out);
  }
}

// out float[kCols][dims], of which `cols` are filled.
inline void SumValues(const ValueRows& rows, const float* probabilities, int cols, int64_t dims, float* out) {
  constexpr int kSums = Vec::kWidth == 16 ? 16 : 8;  // half of the registers
  int64_t dim = 0;
  for (; dim + 4 * Vec::kWidth <= dims; dim += 4 * Vec::kWidth) {
    SumColumns<kSums / 4, 4>(rows, probabilities, cols, dim, dims, out);
  }
  for (; dim + 2 * Vec::kWidth <= dims; dim += 2 * Vec::kWidth) {
    SumColumns<kSums / 2, 2>(rows, probabilities, cols, dim, dims, out);
  }
  for (; dim < dims; dim += Vec::kWidth) {
    SumColumns<kSums, 1>(rows, probabilities, cols, dim, dims, out);
  }
}

}  // namespace
}  // namespace penstock
