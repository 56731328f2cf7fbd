// The steps of a split, from its keys to its sums, for float32 and for tiles, which use copies of keys and values where
// their form differs from the cache's.
#pragma once

#include "attention/attention_kernel.h"

namespace penstock {
namespace {

// Computes the scores of tiles of keys [begin, end) against `wide` (1 or 2) column tiles.
template <Form kForm>
void ScoreAll(const char* const* keys, const AttentionJob& job, const float* queries, int wide, int cols, int begin,
              int end, float* scores, Fetch& fetch) {
  const int64_t dim = job.dim, words = Memory<kForm>::Words(dim);
  if constexpr (kForm == Form::kTiles) {
#ifdef PENSTOCK_HAS_TILES
    const auto* q = reinterpret_cast<const uint32_t*>(queries);
    const int per = wide == 2 ? 2 : 4;
    for (int tile = begin; tile < end; tile += per) {
      float* out = scores + tile * kKeyTile * kCols;
      const int left = end - tile;
      if (wide == 2) {
        if (left >= 2) {
          ScoreTilesTwice<2>(keys + tile, dim, q, words * kCols, out, fetch);
        } else {
          ScoreTilesTwice<1>(keys + tile, dim, q, words * kCols, out, fetch);
        }
      } else {
        if (left >= 4) {
          ScoreTiles<4>(keys + tile, dim, q, out, fetch);
        } else if (left == 3) {
          ScoreTiles<3>(keys + tile, dim, q, out, fetch);
        } else if (left == 2) {
          ScoreTiles<2>(keys + tile, dim, q, out, fetch);
        } else {
          ScoreTiles<1>(keys + tile, dim, q, out, fetch);
        }
      }
    }
#endif
  } else {
    for (int tile = begin; tile < end; ++tile) {
      fetch.Advance();
      float* out = scores + tile * kKeyTile * kCols;
      if (cols > Vec::kWidth) {
        ScoreKeys<kCols / Vec::kWidth>(keys[tile], words * 4, queries, words, out);
      } else {
        ScoreKeys<1>(keys[tile], words * 4, queries, words, out);
      }
    }
  }
}

// Converts keys [begin, end) of a split to the form in which they are scored, at `memory.keys`, unless they are used in
// place.
template <Form kForm>
void PrepareKeys(const AttentionJob& job, const char** keys, int begin, int end, Memory<kForm>& memory, Fetch& fetch) {
  const int64_t dim = job.dim, stride = job.cache_row_bytes();
  if (!job.int8) {
    return;
  }
  for (int at = begin / kKeyTile * kKeyTile; at < end; at += kKeyTile) {
    const char* from = keys[at / kKeyTile];
    float* to = memory.keys + at * dim / (kForm == Form::kTiles ? 2 : 1);
    if constexpr (kForm == Form::kTiles) {
#ifdef PENSTOCK_HAS_TILES
      Bf16Rows(from, kKeyTile, stride, dim, reinterpret_cast<uint16_t*>(to));
#endif
    } else {
      WidenRows(from, kKeyTile, stride, dim, to);
    }
    keys[at / kKeyTile] = reinterpret_cast<const char*>(to);
    fetch.Advance();
  }
}

// Reads the scales of the values of keys [begin, end), where the cache is int8; those of a key that is its own value
// are read with the keys.
template <Form kForm>
void ReadValueScales(const AttentionJob& job, const char* const* values, int begin, int end,
                     const Memory<kForm>& memory) {
  if (job.int8 && !job.keys_only) {
    ReadAllScales(job, values, begin, end, memory.value_scales);
  }
}

// Converts the values of a split's keys [begin, end) to the form in which they are summed, at `memory.values`, unless
// they are used in place.
template <Form kForm>
void PrepareValues(const AttentionJob& job, const char** values, int begin, int end, Memory<kForm>& memory,
                   Fetch& fetch) {
  const int64_t dim = job.value_dim, stride = job.cache_row_bytes();
  if (kForm == Form::kFloat && !job.int8) {
    return;
  }
  constexpr int kStep = kForm == Form::kTiles ? 2 * kKeyTile : kKeyTile;  // AMX sums 32 keys at once
  for (int at = begin / kStep * kStep; at < (end + kStep - 1) / kStep * kStep; at += kKeyTile) {
    const int tile = at / kKeyTile, low = Max(begin - at, 0), high = Min(end - at, kKeyTile);
    fetch.Advance();
    if constexpr (kForm == Form::kFloat) {
      float* to = memory.values + at * dim;
      WidenRows(values[tile] + low * stride, high - low, stride, dim, to + low * dim);
      values[tile] = reinterpret_cast<const char*>(to);
    } else {
#ifdef PENSTOCK_HAS_TILES
      auto* to = reinterpret_cast<uint32_t*>(memory.values) + at / 2 * dim;
      const bool held = low < high;
      if (at % 32) {
        to = to - 8 * dim + 8 * kCols;  // goes to the lower half of the tiles of 16 pairs
      }
      auto* pair = job.int8 ? PairValues<int8_t> : PairValues<uint16_t>;
      pair(values[tile], stride, dim, held ? low : 0, held ? high : 0, 256, kCols, to);
      values[tile] = reinterpret_cast<const char*>(to);
#endif
    }
  }
}

#ifdef PENSTOCK_HAS_TILES
// Transposes the probabilities of keys [begin, end), multiples of kKeyTile, to AMX's A operands: blocks of 32 keys. If
// half of a block has no scores, it gets 0.
inline void Turn(uint32_t* pairs, int begin, int end, uint32_t* turned) {
  if (begin % 32) {
    memset(pairs + begin / 32 * 256, 0, 512);
  }
  if (end % 32) {
    memset(pairs + end / 2 * kCols, 0, 512);
  }
  for (int block = begin / 32; block < (end + 31) / 32; ++block) {
    const uint32_t* rows[16];
    for (int i = 0; i < 16; ++i) {
      rows[i] = pairs + block * 256 + i * kCols;
    }
    TransposeTile(rows, turned + block * 256);
  }
}
#endif

// Adds up the weighted values of keys [begin, end), in `wide` (1 or 2) tiles of sums.
template <Form kForm>
void SumAll(const char* const* values, const AttentionJob& job, int wide, int cols, int begin, int end,
            const Memory<kForm>& memory, Sums* sums, Fetch& fetch) {
  if constexpr (kForm == Form::kTiles) {
#ifdef PENSTOCK_HAS_TILES
    const int first = begin / 32, last = (end + 31) / 32;
    const auto* words = reinterpret_cast<const uint32_t*>(memory.values);
    const uint32_t* turned = memory.turned;
    const int64_t dims = job.value_dim;
    for (int64_t dim = 0; dim < dims; dim += wide == 2 ? 32 : 64) {
      const int64_t left = dims - dim;
      if (wide == 2) {
        float *out = sums[0].values, *out2 = sums[1].values;
        if (left >= 32) {
          SumTilesTwice<2>(turned, words, first, last, dims, dim, out, out2, fetch);
        } else {
          SumTilesTwice<1>(turned, words, first, last, dims, dim, out, out2, fetch);
        }
      } else {
        float* out = sums[0].values;
        if (left >= 64) {
          SumTiles<4>(turned, words, first, last, dims, dim, out, fetch);
        } else if (left == 48) {
          SumTiles<3>(turned, words, first, last, dims, dim, out, fetch);
        } else if (left == 32) {
          SumTiles<2>(turned, words, first, last, dims, dim, out, fetch);
        } else {
          SumTiles<1>(turned, words, first, last, dims, dim, out, fetch);
        }
      }
    }
#endif
  } else {
    const int64_t row_words = job.int8 ? job.value_dim : job.dim;
    const ValueRows rows{values, row_words * 4, begin, end};
    SumValues(rows, memory.probabilities, cols, job.value_dim, sums[0].values);
  }
}

}  // namespace
}  // namespace penstock
