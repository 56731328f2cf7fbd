// Attention of one task for one KV head. The name and the compiler flags of the including file decide the instruction
// set.
//
// For each split and column tile it computes the scores of all keys, their peak and exponentials in float32, and the
// weighted values (FlashAttention's blocks, Dao 2022, with splits as in flash-decoding). Splits are merged by their
// peaks as in the online softmax (Milakov and Gimelshein 2018).
#pragma once

#ifdef __AVX512F__
#include "attention/attention_numbers_avx512.h"
#else
#include "attention/attention_numbers_avx2.h"
#endif
#include "attention/attention_rows.h"
#include "attention/attention_tiles.h"
#include "common/carver.h"
#include "common/common.h"
#include "common/transpose.h"

namespace penstock {
namespace {

// The peak of a query that has seen no key. It is finite, so that differences of peaks are finite too.
constexpr float kNothing = -1e30f;

// The query columns of a tile. Padding columns attend to no key.
struct Columns {
  alignas(64) int32_t oldest[kCols], newest[kCols];
  int32_t token[kCols], head[kCols];
  float query_scales[kCols];                   // of queries in int16
  alignas(64) float slopes[kCols], at[kCols];  // of ALiBi, in powers of two; the position of the query
  int count;
  int min_oldest, max_oldest, min_newest, max_newest;
};

// The part of the split beginning at position `start` that is attended to: its tiles of keys and values; the keys
// [first, last) that are scored, multiples of kKeyTile; and the keys [from, to), the only ones whose values may be
// multiplied. key_scales and value_scales [kSplit] are those of an int8 cache, else null; key_scales are also null
// where scores have them already.
struct Part {
  const char *const *keys, *const *values;
  int start, first, last, from, to;
  const float *key_scales, *value_scales;
};

// Peaks (in powers of two), totals and values [kCols][value_dim] of some keys.
struct Sums {
  alignas(64) float peak[kCols], total[kCols];
  float* values;
};

// How many column tiles are multiplied at once.
template <Form kForm>
constexpr int kWide = kForm == Form::kTiles ? 2 : 1;

template <Form kForm>
struct Memory {
  Columns* columns;  // [tiles]
  Sums* sums;        // [tiles], then kWide for the split that is being computed
  float *queries, *scores, *probabilities, *keys, *values;
  // [kSplit] of an int8 cache. attention_lanes.h reads the scales of keys where it scores them.
  float *key_scales, *value_scales;
  char* tile;        // a copy of a tile of values, for attention_lanes.h
  uint32_t* turned;  // probabilities as AMX's A operand
  char* spread;      // queries of a tile of columns, where keys are spread
  int64_t query_words;

  Memory(const AttentionJob& job, int64_t tiles, Carver& carver) {
    query_words = Words(job.dim);
    columns = carver.Take<Columns>(tiles);
    sums = carver.Take<Sums>(tiles + kWide<kForm>);
    float* values_of_sums = carver.Take<float>((tiles + kWide<kForm>)*kCols * job.value_dim);
    queries = carver.Take<float>(tiles * query_words * kCols);
    scores = carver.Take<float>(kWide<kForm> * kSplit * kCols);
    // Of float32 each takes the place of its score, so that fewer lines of the first cache are used.
    probabilities = kForm == Form::kFloat ? scores : carver.Take<float>(kSplit * kCols);
    constexpr int kPer = kForm == Form::kTiles ? 2 : 1;  // numbers in a word
    const bool converts = job.int8 && kForm != Form::kInPlace;
    keys = carver.Take<float>(converts ? kSplit / kPer * job.dim : 0);
    values = carver.Take<float>(converts || kForm == Form::kTiles ? kSplit / kPer * job.value_dim : 0);
    key_scales = carver.Take<float>(converts ? kSplit : 0);
    value_scales = converts && job.keys_only ? key_scales : carver.Take<float>(job.int8 ? kSplit : 0);
    tile = carver.Take<char>(kForm == Form::kInPlace && !job.int8 ? kKeyTile * job.cache_row_bytes() : 0);
    turned = carver.Take<uint32_t>(kForm == Form::kTiles ? kWide<kForm> * kSplit / 2 * kCols : 0);
    spread = carver.Take<char>(job.spreads() ? kCols * job.input_row_bytes() : 0);
    sums_values_ = values_of_sums;
  }
  void Link(int64_t tiles, int64_t value_dim) {
    for (int64_t t = 0; t < tiles + kWide<kForm>; ++t) {
      sums[t].values = sums_values_ + t * kCols * value_dim;
    }
  }
  static int64_t Words(int64_t dim) {
    if (kForm == Form::kTiles) {
      return (dim + 31) / 32 * 16;
    }
    return kForm == Form::kInPlace ? PaddedDims(dim) : dim;
  }

 private:
  float* sums_values_;
};

// Writes a query of bf16 as numbers for a cache of T, behind those of `column` others, and returns their scale.
template <typename T>
float PrepareQuery(const char* query, int column, int64_t dim, float* queries) {
  auto* to = reinterpret_cast<typename Numbers<T>::Query*>(queries) + column * PaddedDims(dim);
  return Numbers<T>::PrepareQuery(reinterpret_cast<const uint16_t*>(query), dim, to);
}

template <Form kForm>
void LoadColumns(const AttentionJob& job, const AttentionTask& task, int64_t kv_head, int first, Columns& c,
                 char* spread, float* queries) {
  const int64_t group = job.group(), words = Memory<kForm>::Words(job.dim);
  c.count = Min(kCols, task.column_end - first);
  c.min_oldest = c.min_newest = INT32_MAX;
  c.max_oldest = c.max_newest = -1;
  const uint32_t* rows[kCols];
  const int32_t* member = job.members + task.first + first / group;
  int64_t of_group = first % group;
  for (int i = 0; i < kCols; ++i) {
    if (i >= c.count) {
      c.oldest[i] = INT32_MAX;
      c.newest[i] = -1;
      c.slopes[i] = c.at[i] = 0.0f;
      continue;
    }
    const int32_t token = c.token[i] = *member;
    const int64_t head = c.head[i] = static_cast<int32_t>(kv_head * group + of_group);
    if (++of_group == group) {
      of_group = 0, ++member;
    }
    c.oldest[i] = job.oldest[token];
    c.newest[i] = job.newest[token];
    c.slopes[i] = job.slopes ? job.slopes[head] * kLog2E : 0.0f;
    c.at[i] = static_cast<float>(job.positions[token]);
    c.min_oldest = Min(c.min_oldest, c.oldest[i]);
    c.max_oldest = Max(c.max_oldest, c.oldest[i]);
    c.min_newest = Min(c.min_newest, c.newest[i]);
    c.max_newest = Max(c.max_newest, c.newest[i]);
    const char* q = job.q + (token * job.heads + head) * job.input_row_bytes();
    if (job.spreads()) {
      char* to = spread + i * job.input_row_bytes();
      SpreadQuery(job, q, to);
      q = to;
    }
    if constexpr (kForm == Form::kInPlace) {
      auto* prepare = job.int8 ? PrepareQuery<int8_t> : PrepareQuery<uint16_t>;
      c.query_scales[i] = prepare(q, i, job.dim, queries);
    } else {
      rows[i] = reinterpret_cast<const uint32_t*>(q);
    }
  }
  if constexpr (kForm != Form::kInPlace) {
    alignas(64) static const uint32_t zeros[16] = {};
    for (int64_t chunk = 0; chunk * 16 < words; ++chunk) {
      const int64_t at = kForm == Form::kTiles ? ChunkOffset(chunk, job.dim) / 4 : chunk * 16;
      const uint32_t* from[16];
      for (int i = 0; i < kCols; ++i) {
        from[i] = i < c.count ? rows[i] + at : zeros;
      }
      auto* to = reinterpret_cast<uint32_t*>(queries) + chunk * 256;
      TransposeTile(from, to);
      memset(to, 0, (chunk * 16 - at) * kCols * 4);  // these dims belong to the chunk before
    }
  }
}

// Prefetches the queries of up to kCols columns of a task.
inline void FetchQueries(const AttentionJob& job, const AttentionTask& task, int64_t kv_head, int first) {
  const int last = Min(first + kCols, task.column_end), group = static_cast<int>(job.group());
  const int64_t bytes = job.input_row_bytes();
  for (int column = first; column < last;) {
    // Those of a token lie side by side.
    const int of_group = column % group, count = Min(group - of_group, last - column);
    const int64_t token = job.members[task.first + column / group];
    const char* q = job.q + (token * job.heads + kv_head * group + of_group) * bytes;
    for (int64_t at = 0; at < count * bytes; at += kCacheLine) {
      _mm_prefetch(q + at, _MM_HINT_T0);
    }
    column += count;
  }
}

// Finds the tiles of keys (value = 0) or values (value = 1) of positions [begin, end) of a split.
inline void FindTiles(const AttentionJob& job, const AttentionTask& task, int64_t kv_head, int start, int begin,
                      int end, int value, const char** tiles) {
  const int64_t bytes = kKeyTile * job.cache_row_bytes();
  const char* tile = nullptr;
  int64_t left = 0;  // bytes of the page from `tile` on
  for (int at = begin / kKeyTile * kKeyTile; at < end; at += kKeyTile, tile += bytes, left -= bytes) {
    if (left == 0) {
      tile = job.tile(task, kv_head, start + at, value);
      left = (job.page_size - (start + at) % job.page_size) * job.cache_row_bytes();
    }
    tiles[at / kKeyTile] = tile;
  }
}

// Finds the positions [low, high) that some token of a task attends to.
inline void Range(const AttentionJob& job, const AttentionTask& task, int* low, int* high) {
  *low = INT32_MAX;
  *high = 0;
  for (int i = 0; i < task.count; ++i) {
    const int32_t token = job.members[task.first + i];
    *low = Min(*low, job.oldest[token]);
    *high = Max(*high, job.newest[token] + 1);
  }
}

// Turns the scores of a part's keys into probabilities relative to the split's peak, which are written to `out` times
// their values' scales, and fills the split's peak and total.
template <Form kForm>
void Softmax(const AttentionJob& job, const Columns& c, const Part& part, float* scores, float* out, Sums& sums,
             Fetch& fetch) {
  const int begin = part.first, end = part.last;
  const float *key_scales = part.key_scales, *value_scales = part.value_scales;
  const bool cap = job.softcap > 0.0f, slopes = job.slopes, changed = key_scales || cap || slopes;
  constexpr int kPeaks = 4;  // so that no maximum waits for the one before
  const float factor = cap || slopes ? 1.0f : job.scale * kLog2E;
  const int vecs = (c.count + Vec::kWidth - 1) / Vec::kWidth;
  for (int v = 0; v < vecs; ++v) {
    const int col = v * Vec::kWidth;
    Vec::F peaks[kPeaks];
    for (auto& p : peaks) {
      p = Vec::Set(-__builtin_inff());
    }
    for (int tile = begin; tile < end; tile += kKeyTile) {
      fetch.Advance();
      const int first = part.start + tile;
      const bool masked = first < c.max_oldest || first + kKeyTile - 1 > c.min_newest;
      float* from = scores + tile * kCols + col;
      for (int key = 0; (changed || masked) && key < kKeyTile; ++key) {
        Vec::F x = Vec::Load(from + key * kCols);
        if (key_scales) {
          x = Vec::Mul(x, Vec::Set(key_scales[tile + key]));
        }
        if (cap) {
          x = Vec::Mul(Tanh(Vec::Mul(x, Vec::Set(job.scale / job.softcap))), Vec::Set(job.softcap * kLog2E));
        } else if (slopes) {
          x = Vec::Mul(x, Vec::Set(job.scale * kLog2E));
        }
        if (slopes) {
          const Vec::F back = Vec::Sub(Vec::Set(static_cast<float>(first + key)), Vec::Load(c.at + col));
          x = Vec::Fma(Vec::Load(c.slopes + col), back, x);
        }
        if (masked) {
          x = Vec::Within(x, first + key, c.oldest + col, c.newest + col);
        }
        Vec::Store(from + key * kCols, x);
      }
      for (int key = 0; key < kKeyTile; key += kPeaks) {
        for (int i = 0; i < kPeaks; ++i) {
          peaks[i] = Vec::Max(peaks[i], Vec::Load(from + (key + i) * kCols));
        }
      }
    }
    Vec::F peak = peaks[0];
    for (int i = 1; i < kPeaks; ++i) {
      peak = Vec::Max(peak, peaks[i]);
    }
    peak = Vec::Max(Vec::Set(kNothing), Vec::Mul(peak, Vec::Set(factor)));
    Vec::F total = Vec::Set(0.0f);
    const Vec::F minus_peak = Vec::Sub(Vec::Set(0.0f), peak);
    for (int key = begin; key < end; key += 2) {
      if (key % kKeyTile == 0) {
        fetch.Advance();
      }
      Vec::F p[2];
      for (int i = 0; i < 2; ++i) {
        p[i] = Exp2(Vec::Fma(Vec::Load(scores + (key + i) * kCols + col), Vec::Set(factor), minus_peak));
        total = Vec::Add(total, p[i]);
        if (value_scales) {
          p[i] = Vec::Mul(p[i], Vec::Set(value_scales[key + i]));
        }
      }
      if constexpr (kForm == Form::kTiles) {
#ifdef PENSTOCK_HAS_TILES
        StorePair(reinterpret_cast<uint32_t*>(out) + key / 2 * kCols + col, p[0], p[1]);
#endif
      } else {
        Vec::Store(out + key * kCols + col, p[0]);
        Vec::Store(out + (key + 1) * kCols + col, p[1]);
      }
    }
    Vec::Store(sums.peak + col, peak);
    Vec::Store(sums.total + col, total);
  }
}

}  // namespace
}  // namespace penstock
