// The products of attention_lanes.h on AVX2, straight from the cache's rows for any number of columns. A vector's lanes
// are 8 numbers of bf16 as float32, or 16 of int8 as int16, whose products are added up in int32: so sums over an int8
// cache are exact, but for the rounding of queries (PrepareQuery) and probabilities (RoundProbabilities) to int16.
//
// Scores are sums over lanes that are dims, so keys need not be transposed. While a tile is used, others are prefetched
// line by line (Ahead): memory then never waits for the computation, nor the computation for memory.
#pragma once

#include <type_traits>

#include "attention/attention_lanes.h"
#include "attention/attention_numbers_avx2.h"

namespace penstock {
namespace {

constexpr int kScalesBehind = 4;  // how many tiles after their prefetch the scales of values are read

// What is prefetched while a tile is used: the lines of a tile that is used much later, from memory to the second
// cache, and those of the one that is used next, from there to the first cache.
struct Ahead {
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

// Computes the scores of a tile of keys, which lie `stride` bytes apart, for kC columns, whose queries lie `dim`
// numbers apart, and prefetches what is ahead. `scales` are of the columns' queries; each key of int8 is followed by
// its own.
template <typename T, int kC>
[[gnu::noinline]] void ScoreTile(const char* keys, int64_t stride, int64_t dim,
                                 const typename Numbers<T>::Query* queries, const float* scales, float* scores,
                                 Ahead ahead) {
  using N = Numbers<T>;
  constexpr int kKeys = kC == 1 ? 8 : kC == 4 ? 2 : 4;             // as many as the registers hold
  constexpr int kLines = kKeys * static_cast<int>(sizeof(T)) / 2;  // cache lines that 32 dims of these keys take
  ahead.Prefetch(kKeyTile * stride - 1);
  for (int first = 0; first < kKeyTile; first += kKeys, keys += kKeys * stride) {
    typename N::Sum sum[kC][kKeys];
    for (auto& column : sum) {
      for (auto& s : column) {
        s = N::Zero();
      }
    }
    // Where GCC does not inline it, the sums lie in memory.
    const auto add = [&](int64_t d) __attribute__((always_inline)) {
      for (int k = 0; k < kKeys; ++k) {
        const auto key = N::Load(keys + k * stride + d * static_cast<int64_t>(sizeof(T)));
        for (int c = 0; c < kC; ++c) {
          sum[c][k] = N::Add(sum[c][k], key, queries + c * dim + d);
        }
      }
    };
    int64_t d = 0;
    for (; d + 32 <= dim; d += 32) {
      for (int line = 0; line < kLines; ++line) {
        ahead.Advance();
      }
      add(d);
      add(d + 16);
    }
    if (d < dim) {
      for (int line = 0; line < kLines; line += 2) {
        ahead.Advance();
      }
      add(d);
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

// Adds kV times 16 dims of keys [from, to) of a tile, times their probabilities, to the sums of kC columns, which lie
// `dims` apart. Prefetches as many lines as it uses.
template <typename T, int kC, int kV>
[[gnu::always_inline]] inline void SumDims(const char* values, int64_t stride, int64_t dims, int from, int to,
                                           const float* probabilities, float* sums, Ahead& ahead) {
  using N = Numbers<T>;
  typename N::Sum sum[kC][2 * kV];
  for (int c = 0; c < kC; ++c) {
    for (int v = 0; v < 2 * kV; ++v) {
      sum[c][v] = N::LoadSums(sums + c * dims + v * 8);
    }
  }
  const char* at = values + from * stride;
  // Where GCC does not inline it, the sums lie in memory.
  const auto add = [&](int key) __attribute__((always_inline)) {
    typename N::Sum wide[2 * kV];
    for (int v = 0; v < kV; ++v) {
      N::LoadValues(at + v * 16 * static_cast<int64_t>(sizeof(T)), stride, wide + 2 * v);
    }
    for (int c = 0; c < kC; ++c) {
      const auto probability = N::LoadProbability(probabilities + c * kSplit, key);
      for (int v = 0; v < 2 * kV; ++v) {
        sum[c][v] = N::AddValues(sum[c][v], wide[v], probability);
      }
    }
    at += N::kKeys * stride;
  };
  int key = from;
  for (; key + 2 * N::kKeys <= to; key += 2 * N::kKeys) {
    for (int line = 0; line < kV; ++line) {
      ahead.Advance();
    }
    add(key);
    add(key + N::kKeys);
  }
  if (key < to) {
    add(key);
  }
  for (int c = 0; c < kC; ++c) {
    for (int v = 0; v < 2 * kV; ++v) {
      N::StoreSums(sums + c * dims + v * 8, sum[c][v]);
    }
  }
}

// Adds all dims of keys [from, to) of a tile, times their probabilities, to the sums of kC columns, and prefetches what
// is ahead.
template <typename T, int kC>
[[gnu::always_inline]] inline void SumKeys(const char* values, int64_t stride, int64_t dims, int from, int to,
                                           const float* probabilities, float* sums, Ahead ahead) {
  constexpr int kV = kC == 1 && sizeof(T) == 2 ? 4 : kC <= 2 ? 2 : 1;  // as many as the registers hold
  constexpr int64_t kBytes = 16 * sizeof(T);
  ahead.Prefetch(kKeyTile * stride - 1);
  int64_t dim = 0;
  for (; dim + 16 * kV <= dims; dim += 16 * kV, values += kV * kBytes) {
    SumDims<T, kC, kV>(values, stride, dims, from, to, probabilities, sums + dim, ahead);
  }
  for (; dim < dims; dim += 16, values += kBytes) {
    SumDims<T, kC, 1>(values, stride, dims, from, to, probabilities, sums + dim, ahead);
  }
}

// As SumKeys; compilers make better code of it where they know the range.
template <typename T, int kC>
[[gnu::noinline]] void SumTile(const char* values, int64_t stride, int64_t dims, int from, int to,
                               const float* probabilities, float* sums, Ahead ahead) {
  if (from == 0 && to == kKeyTile) {
    SumKeys<T, kC>(values, stride, dims, 0, kKeyTile, probabilities, sums, ahead);
  } else {
    SumKeys<T, kC>(values, stride, dims, from, to, probabilities, sums, ahead);
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

// The largest of `count` numbers that are not negative, or NaN if one is: as integers, bits have the same order as
// sizes.
inline float LargestProbability(const float* from, int count) {
  const __m256i size = _mm256_set1_epi32(INT32_MAX);
  __m256i most = _mm256_setzero_si256();
  for (int i = 0; i < count; i += 8) {
    most = _mm256_max_epi32(most, _mm256_and_si256(size, _mm256_castps_si256(Vec::Load(from + i))));
  }
  alignas(32) float lanes[8];
  Vec::Store(lanes, _mm256_castsi256_ps(most));
  int32_t largest = 0;
  for (const float lane : lanes) {
    int32_t bits;
    memcpy(&bits, &lane, 4);
    largest = Max(largest, bits);
  }
  float number;
  memcpy(&number, &largest, 4);
  return number;
}

// Rounds the probabilities of keys [first, last), times their values' scales, to int16, in place, with a scale for each
// column, which is NaN if one of them is not finite. Products with 256 values of int8 add up to less than 2^31. Each is
// rounded by at most 2^-16 of the largest of the column's split: so all 256 together change the split's sum by no more
// than the rounding of the largest one's value to int8 may.
inline void RoundProbabilities(int count, int first, int last, float* probabilities, float* scales) {
  constexpr float kMost = 32767.0f;
  for (int c = 0; c < count; ++c) {
    float* row = probabilities + c * kSplit;
    const float peak = LargestProbability(row + first, last - first);
    scales[c] = peak <= __FLT_MAX__ ? peak / kMost : __builtin_nanf("");
    const float inverse = Inverse(peak, kMost);
    auto* to = reinterpret_cast<int16_t*>(row);
    for (int key = first; key < last; key += 16) {
      StoreInt16(Vec::Load(row + key), Vec::Load(row + key + 8), inverse, to + key);
    }
  }
}

// Turns one column's sums into float32, in the order of dims.
template <typename T>
void FinishSums(int64_t dims, float scale, float* sums) {
  for (float* at = sums; at < sums + dims; at += 16) {
    Vec::F a = Vec::Load(at), b = Vec::Load(at + 8);
    if (sizeof(T) == 2) {
      const Vec::F low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
      a = low, b = high;
    } else {
      a = Vec::Mul(_mm256_cvtepi32_ps(_mm256_castps_si256(a)), Vec::Set(scale));
      b = Vec::Mul(_mm256_cvtepi32_ps(_mm256_castps_si256(b)), Vec::Set(scale));
    }
    Vec::Store(at, _mm256_permute2f128_ps(a, b, 0x20));
    Vec::Store(at + 8, _mm256_permute2f128_ps(a, b, 0x31));
  }
}

// Computes a split's sums for the columns of a tile. T is the cache's kind of number.
template <typename T>
void AttendDirect(const AttentionJob& job, const Columns& c, const float* queries, const Part& part,
                  const Memory<Form::kWiden>& memory, Sums& sums, Fetch& fetch_values, Fetch& fetch_next) {
  const int64_t stride = job.cache_row_bytes(), dims = job.value_dim;
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
      ScoreTile<T, decltype(columns)::value>(keys, stride, job.dim, q + first * job.dim, c.query_scales + first,
                                             scores + first * kSplit + tile,
                                             first == 0 ? Ahead{later, next} : Ahead{keys, keys});
    });
    read_scales(tile - kScalesBehind * kKeyTile);
  }
  for (int tile = part.last - kScalesBehind * kKeyTile; tile < part.last; tile += kKeyTile) {
    read_scales(tile);
  }
  SoftmaxLanes(job, c, part, scores, probabilities, sums, fetch_values);
  int from = part.from, to = part.to;
  float scales[kCols] = {};
  if (sizeof(T) == 1) {
    RoundProbabilities(c.count, part.first, part.last, probabilities, scales);
    from = part.first, to = part.last;  // values have no NaN, and those of other keys are multiplied by 0
  }
  memset(sums.values, 0, c.count * dims * 4);
  for (int tile = from / kKeyTile * kKeyTile; tile < to; tile += kKeyTile) {
    const char *values = part.values[tile / kKeyTile], *later = fetch_next.Tile(values);
    const char* next = tile + kKeyTile < to ? part.values[tile / kKeyTile + 1] : fetch_next.First(values);
    const int low = Max(from - tile, 0), high = Min(to - tile, kKeyTile);
    InColumns(c.count, [&](auto columns, int first) {
      const float* p = probabilities + first * kSplit + (sizeof(T) == 2 ? tile : tile / 2);
      SumTile<T, decltype(columns)::value>(values, stride, dims, low, high, p, sums.values + first * dims,
                                           first == 0 ? Ahead{later, next} : Ahead{values, values});
    });
  }
  for (int col = 0; col < c.count; ++col) {
    FinishSums<T>(dims, scales[col], sums.values + col * dims);
  }
}

}  // namespace
}  // namespace penstock
