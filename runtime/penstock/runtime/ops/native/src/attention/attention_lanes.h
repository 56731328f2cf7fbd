// The products of attention over keys of bf16 or int8 without AMX, straight from the cache's rows, for any number of
// columns: scores and probabilities are [column][kSplit keys]. A vector's lanes are dims, of scores until they are
// added up, so keys need not be transposed. What is multiplied depends on the instruction set (attention_numbers_*.h).
//
// Memory bandwidth limits decoding: while a tile is used, others are prefetched line by line (Lines), so that memory
// never waits for the computation, nor the computation for memory.
#pragma once

#include <type_traits>

#include "attention/attention_softmax_lanes.h"

namespace penstock {
namespace {

constexpr int kScalesBehind = 4;  // how many tiles after their prefetch the scales of values are read

// What is prefetched while a tile is used: the lines of a tile that is used much later, from memory to the second
// cache, and those of the one that is used next, from there to the first cache.
struct Lines {
  const char *later, *next;

  void Prefetch(int64_t offset) const {
    _mm_prefetch(later + offset, _MM_HINT_T1);
    _mm_prefetch(next + offset, _MM_HINT_T0);
  }
  void Advance() {
    Prefetch(0);
    later += kCacheLine, next += kCacheLine;
  }
};

// What columns after the first ones of a tile prefetch.
struct Nothing {
  void Prefetch(int64_t) const {}
  void Advance() const {}
};

// The sums of the lanes of four vectors.
template <typename T>
inline __m128 SumLanes(const typename Numbers<T>::Sum& a, const typename Numbers<T>::Sum& b,
                       const typename Numbers<T>::Sum& c, const typename Numbers<T>::Sum& d) {
  using N = Numbers<T>;
  return N::AddLanes(N::AddPairs(N::AddHalves(a, b), N::AddHalves(c, d)));
}

// How many keys are scored at once for `columns` columns: as many as the registers hold.
constexpr int KeysAtOnce(int columns) {
  if (Vec::kWidth == 16) {
    return columns <= 2 ? 8 : 4;
  }
  return columns == 1 ? 8 : columns == 4 ? 2 : 4;
}

// Computes the scores of a tile of keys, which lie `stride` bytes apart, for kC columns, whose queries lie
// PaddedDims(dim) numbers apart, and prefetches what is ahead. `scales` are of the columns' queries; each key of int8
// is followed by its own.
template <typename T, int kC, typename Ahead>
[[gnu::noinline]] void ScoreTile(const char* keys, int64_t stride, int64_t dim,
                                 const typename Numbers<T>::Query* queries, const float* scales, float* scores,
                                 Ahead ahead) {
  using N = Numbers<T>;
  constexpr int kKeys = KeysAtOnce(kC);
  constexpr int kLines = kKeys * static_cast<int>(sizeof(T)) / 2;  // cache lines that 32 dims of these keys take
  const int64_t query_stride = PaddedDims(dim);
  ahead.Prefetch(kKeyTile * stride - 1);
  for (int first = 0; first < kKeyTile; first += kKeys, keys += kKeys * stride) {
    typename N::Sum sum[kC][kKeys];
    for (auto& column : sum) {
      for (auto& s : column) {
        s = N::Zero();
      }
    }
    // Where GCC does not inline it, the sums lie in memory.
    const auto add = [&](int64_t d, auto load) __attribute__((always_inline)) {
      for (int k = 0; k < kKeys; ++k) {
        const auto key = load(keys + k * stride + d * static_cast<int64_t>(sizeof(T)));
        for (int c = 0; c < kC; ++c) {
          sum[c][k] = N::Add(sum[c][k], key, queries + c * query_stride + d);
        }
      }
    };
    int64_t d = 0;
    for (; d + 32 <= dim; d += 32) {
      for (int line = 0; line < kLines; ++line) {
        ahead.Advance();
      }
      for (int64_t i = 0; i < 32; i += N::kDims) {
        add(d + i, N::Load);
      }
    }
    if (d < dim) {
      for (int line = 0; line < kLines; line += 2) {
        ahead.Advance();
      }
      add(d, N::LoadSixteen);
    }
    const auto scale_of = [&](int k) { return Word(keys + k * stride + dim); };
    if constexpr (kKeys >= 4) {
      for (int k = 0; k < kKeys; k += 4) {
        const __m128 key_scales = sizeof(T) == 1
                                      ? _mm_setr_ps(scale_of(k), scale_of(k + 1), scale_of(k + 2), scale_of(k + 3))
                                      : _mm_setzero_ps();
        for (int c = 0; c < kC; ++c) {
          __m128 four = SumLanes<T>(sum[c][k], sum[c][k + 1], sum[c][k + 2], sum[c][k + 3]);
          if (sizeof(T) == 1) {
            four = _mm_mul_ps(_mm_mul_ps(four, _mm_set1_ps(scales[c])), key_scales);
          }
          _mm_storeu_ps(scores + c * kSplit + first + k, four);
        }
      }
    } else {
      const float even = sizeof(T) == 1 ? scale_of(0) : 0.0f, odd = sizeof(T) == 1 ? scale_of(1) : 0.0f;
      for (int c = 0; c < kC; c += 2) {
        __m128 four = SumLanes<T>(sum[c][0], sum[c][1], sum[c + 1][0], sum[c + 1][1]);
        if (sizeof(T) == 1) {
          four = _mm_mul_ps(four, _mm_setr_ps(scales[c], scales[c], scales[c + 1], scales[c + 1]));
          four = _mm_mul_ps(four, _mm_setr_ps(even, odd, even, odd));
        }
        _mm_storel_pi(reinterpret_cast<__m64*>(scores + c * kSplit + first), four);
        _mm_storeh_pi(reinterpret_cast<__m64*>(scores + (c + 1) * kSplit + first), four);
      }
    }
  }
}

// Adds the values of a tile's keys, times their probabilities, to the sums of kC columns, which lie `dims` apart: kV
// times N::kDims dims, or sixteen if kV is 0. Prefetches as many lines as it uses.
template <typename T, int kC, int kV, typename Ahead>
[[gnu::always_inline]] inline void SumDims(const char* values, int64_t stride, int64_t dims, const float* probabilities,
                                           float* sums, Ahead& ahead) {
  using N = Numbers<T>;
  constexpr int kVecs = kV > 0 ? 2 * kV : 1;
  constexpr int kBytes = kVecs * Vec::kWidth * N::kKeys * static_cast<int>(sizeof(T));  // of kKeys keys
  constexpr int kSteps = Max(1, static_cast<int>(kCacheLine) / kBytes);
  typename N::Sum sum[kC][kVecs];
  for (int c = 0; c < kC; ++c) {
    for (int v = 0; v < kVecs; ++v) {
      sum[c][v] = N::LoadSums(sums + c * dims + v * Vec::kWidth);
    }
  }
  // Where GCC does not inline it, the sums lie in memory.
  const auto add = [&](int key) __attribute__((always_inline)) {
    typename N::Values wide[kVecs];
    if constexpr (kV == 0) {
      wide[0] = N::LoadSixteenValues(values, stride);
    }
    for (int v = 0; v < kV; ++v) {
      N::LoadValues(values + v * N::kDims * static_cast<int64_t>(sizeof(T)), stride, wide + 2 * v);
    }
    for (int c = 0; c < kC; ++c) {
      const auto probability = N::LoadProbability(probabilities + c * kSplit, key);
      for (int v = 0; v < kVecs; ++v) {
        sum[c][v] = N::AddValues(sum[c][v], wide[v], probability);
      }
    }
    values += N::kKeys * stride;
  };
  for (int key = 0; key < kKeyTile; key += kSteps * N::kKeys) {
    for (int line = 0; line < kSteps * kBytes; line += kCacheLine) {
      ahead.Advance();
    }
    for (int step = 0; step < kSteps; ++step) {
      add(key + step * N::kKeys);
    }
  }
  for (int c = 0; c < kC; ++c) {
    for (int v = 0; v < kVecs; ++v) {
      N::StoreSums(sums + c * dims + v * Vec::kWidth, sum[c][v]);
    }
  }
}

// How many pairs of vectors of a key's value are added up at once for `columns` columns, if values take `bytes` bytes:
// as many as the registers hold.
constexpr int PairsAtOnce(int columns, int bytes) {
  if (Vec::kWidth == 16) {
    return columns <= 2 ? 4 : 2;
  }
  return columns == 1 && bytes == 2 ? 4 : columns <= 2 ? 2 : 1;
}

// Adds the values of a tile's keys, times their probabilities, to the sums of kC columns, and prefetches what is ahead.
template <typename T, int kC, typename Ahead>
[[gnu::noinline]] void SumTile(const char* values, int64_t stride, int64_t dims, const float* probabilities,
                               float* sums, Ahead ahead) {
  constexpr int kDims = Numbers<T>::kDims, kV = PairsAtOnce(kC, sizeof(T));
  ahead.Prefetch(kKeyTile * stride - 1);
  int64_t dim = 0;
  const auto sum = [&](auto pairs) __attribute__((always_inline)) {
    constexpr int kPairs = decltype(pairs)::value, kStep = kPairs > 0 ? kPairs * kDims : 16;
    for (; dim + kStep <= dims; dim += kStep) {
      SumDims<T, kC, kPairs>(values + dim * static_cast<int64_t>(sizeof(T)), stride, dims, probabilities, sums + dim,
                             ahead);
    }
  };
  sum(std::integral_constant<int, kV>{});
  if constexpr (kV > 2) {
    sum(std::integral_constant<int, 2>{});
  }
  if constexpr (kV > 1) {
    sum(std::integral_constant<int, 1>{});
  }
  if constexpr (kDims > 16) {
    sum(std::integral_constant<int, 0>{});
  }
}

// Calls body(std::integral_constant<int, kC>, first column) for blocks of 4, 3, 2 or 1 columns.
template <typename Body>
void InColumns(int count, Body&& body) {
  int first = 0;
  for (; first + 4 <= count; first += 4) {
    body(std::integral_constant<int, 4>{}, first);
  }
  if (count - first == 3) {
    body(std::integral_constant<int, 3>{}, first);
  } else if (count - first == 2) {
    body(std::integral_constant<int, 2>{}, first);
  } else if (count - first == 1) {
    body(std::integral_constant<int, 1>{}, first);
  }
}

// Turns one column's sums into float32, in the order of dims, times `scale` if they are of integers.
template <typename T>
void FinishSums(int64_t dims, float scale, float* sums) {
  constexpr int kDims = Numbers<T>::kDims;
  int64_t dim = 0;
  for (; dim + kDims <= dims; dim += kDims) {
    Numbers<T>::Finish(scale, sums + dim);
  }
  if constexpr (kDims > 16) {
    if (dim < dims) {
      Numbers<T>::FinishSixteen(scale, sums + dim);
    }
  }
}

// Copies a tile of values, of `bytes` bytes each, with zeros for those of keys outside [from, to): the cache may hold
// anything there, NaN too.
inline void CopyTile(const char* values, int64_t stride, int64_t bytes, int from, int to, char* copy) {
  for (int key = 0; key < kKeyTile; ++key) {
    if (from <= key && key < to) {
      memcpy(copy + key * stride, values + key * stride, bytes);
    } else {
      memset(copy + key * stride, 0, bytes);
    }
  }
}

// Computes a split's sums for the columns of a tile. T is the cache's kind of number.
template <typename T>
void AttendInPlace(const AttentionJob& job, const Columns& c, const float* queries, const Part& part,
                   const Memory<Form::kInPlace>& memory, Sums& sums, Fetch& fetch_values, Fetch& fetch_next) {
  const int64_t stride = job.cache_row_bytes(), dims = job.value_dim, query_stride = PaddedDims(job.dim);
  const auto* q = reinterpret_cast<const typename Numbers<T>::Query*>(queries);
  float *scores = memory.scores, *probabilities = memory.probabilities;
  // The scales of a tile's values are read some tiles after the values were prefetched, so that few reads wait for
  // memory; those of the last tiles are read at the end.
  const auto read_scales = [&](int tile) {
    if (sizeof(T) == 1 && tile >= part.first) {
      ReadScales(job, part.values, Max(tile, part.from), Min(tile + kKeyTile, part.to), memory.value_scales);
    }
  };
  if (sizeof(T) == 1) {
    memset(memory.value_scales + part.first, 0, (part.last - part.first) * sizeof(float));
  }
  for (int tile = part.first; tile < part.last; tile += kKeyTile) {
    const char *keys = part.keys[tile / kKeyTile], *later = fetch_values.Tile(keys);
    const bool more = tile + kKeyTile < part.last;
    const char* next = more ? part.keys[tile / kKeyTile + 1] : part.values[part.from / kKeyTile];
    InColumns(c.count, [&](auto columns, int first) {
      constexpr int kC = decltype(columns)::value;
      const auto* to_score = q + first * query_stride;
      float* to = scores + first * kSplit + tile;
      const float* query_scales = c.query_scales + first;
      if (first == 0) {
        ScoreTile<T, kC>(keys, stride, job.dim, to_score, query_scales, to, Lines{later, next});
      } else {
        ScoreTile<T, kC>(keys, stride, job.dim, to_score, query_scales, to, Nothing{});
      }
    });
    read_scales(tile - kScalesBehind * kKeyTile);
  }
  for (int tile = part.last - kScalesBehind * kKeyTile; tile < part.last; tile += kKeyTile) {
    read_scales(tile);
  }
  SoftmaxLanes(job, c, part, scores, probabilities, sums, fetch_values);
  float scales[kCols] = {};
  Numbers<T>::RoundProbabilities(c.count, part.first, part.last, probabilities, scales);
  memset(sums.values, 0, c.count * dims * 4);
  // Values of int8 are never NaN, and those of keys that are not attended to are multiplied by 0.
  const int from = sizeof(T) == 1 ? part.first : part.from, to = sizeof(T) == 1 ? part.last : part.to;
  for (int tile = from / kKeyTile * kKeyTile; tile < to; tile += kKeyTile) {
    const char *values = part.values[tile / kKeyTile], *later = fetch_next.Tile(values);
    const char* next = tile + kKeyTile < to ? part.values[tile / kKeyTile + 1] : fetch_next.First(values);
    if (tile < from || tile + kKeyTile > to) {
      CopyTile(values, stride, dims * static_cast<int64_t>(sizeof(T)), from - tile, to - tile, memory.tile);
      values = memory.tile;
    }
    InColumns(c.count, [&](auto columns, int first) {
      constexpr int kC = decltype(columns)::value;
      const float* p = probabilities + first * kSplit + tile / Numbers<T>::kKeys;
      float* to_add = sums.values + first * dims;
      if (first == 0) {
        SumTile<T, kC>(values, stride, dims, p, to_add, Lines{later, next});
      } else {
        SumTile<T, kC>(values, stride, dims, p, to_add, Nothing{});
      }
    });
  }
  for (int col = 0; col < c.count; ++col) {
    FinishSums<T>(dims, scales[col], sums.values + col * dims);
  }
}

}  // namespace
}  // namespace penstock
