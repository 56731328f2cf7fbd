// The products of attention_lanes.h on AVX2, where a vector has 8 lanes. A score is the sum of two chains of products,
// of the even and of the odd dims, so that few columns have enough chains to keep the FMA units busy.
#pragma once

#include <type_traits>

#include "attention/attention_lanes.h"

namespace penstock {
namespace {

constexpr int kFewColumns = 16;
constexpr bool kWidensValues = false;  // values are widened in registers for many columns too

// Number i of each word, widened.
template <typename T>
inline Vec::F NumberOf(__m256i words, int i);
template <>
inline Vec::F NumberOf<uint16_t>(__m256i words, int i) {
  return i == 0 ? Vec::EvenHalves(_mm256_castsi256_ps(words)) : Vec::OddHalves(_mm256_castsi256_ps(words));
}
template <>
inline Vec::F NumberOf<int8_t>(__m256i words, int i) {
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 24 - 8 * i), 24));
}

// Transposes 4 words of 8 keys that begin every `stride` bytes.
inline void TurnWords(const char* keys, int64_t stride, __m256i* words) {
  __m256i rows[4];
  for (int i = 0; i < 4; ++i) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys + i * stride));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys + (i + 4) * stride));
    rows[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  }
  const __m256i a = _mm256_unpacklo_epi32(rows[0], rows[1]), b = _mm256_unpackhi_epi32(rows[0], rows[1]);
  const __m256i c = _mm256_unpacklo_epi32(rows[2], rows[3]), d = _mm256_unpackhi_epi32(rows[2], rows[3]);
  words[0] = _mm256_unpacklo_epi64(a, c);
  words[1] = _mm256_unpackhi_epi64(a, c);
  words[2] = _mm256_unpacklo_epi64(b, d);
  words[3] = _mm256_unpackhi_epi64(b, d);
}

// Transposes a tile of keys, which lie `stride` bytes apart, to float [dim][kKeyTile].
template <typename T>
void TurnKeys(const char* keys, int64_t stride, int64_t dim, float* to) {
  for (int64_t d = 0; d < dim; d += 4 * kPerWord<T>, keys += 16) {
    for (int group = 0; group < kKeyTile; group += 8) {
      __m256i words[4];
      TurnWords(keys + group * stride, stride, words);
      for (int w = 0; w < 4; ++w) {
        for (int i = 0; i < kPerWord<T>; ++i) {
          Vec::Store(to + (d + w * kPerWord<T> + i) * kKeyTile + group, NumberOf<T>(words[w], i));
        }
      }
    }
  }
}

// Computes the scores of a transposed tile of keys for kC columns; if kAdd, they are added to those that are there.
template <int kC, bool kAdd>
void ScoreTurnedColumns(const float* keys, int64_t dim, const float* queries, float* scores) {
  Vec::F sum[kC][2];
  for (auto& column : sum) {
    column[0] = column[1] = Vec::Set(0.0f);
  }
  for (int64_t d = 0; d < dim; d += 2, keys += 2 * kKeyTile, queries += 2 * kCols) {
    const Vec::F low = Vec::Load(keys), high = Vec::Load(keys + 8);
    for (int c = 0; c < kC; ++c) {
      const Vec::F q = Vec::Set(queries[c]);
      sum[c][0] = Vec::Fma(low, q, sum[c][0]);
      sum[c][1] = Vec::Fma(high, q, sum[c][1]);
    }
  }
  for (int c = 0; c < kC; ++c) {
    for (int v = 0; v < 2; ++v) {
      float* to = scores + c * kSplit + v * 8;
      Vec::Store(to, kAdd ? Vec::Add(Vec::Load(to), sum[c][v]) : sum[c][v]);
    }
  }
}

// Computes the scores of a transposed tile of keys for all columns.
inline void ScoreTurned(const float* keys, int64_t dim, const float* queries, float* scores) {
  const auto score = [&](auto columns, int first) {
    constexpr int kC = decltype(columns)::value;
    ScoreTurnedColumns<kC, false>(keys, dim, queries + first, scores + first * kSplit);
    ScoreTurnedColumns<kC, true>(keys + kKeyTile, dim, queries + kCols + first, scores + first * kSplit);
  };
  score(std::integral_constant<int, 6>{}, 0);
  score(std::integral_constant<int, 6>{}, 6);
  score(std::integral_constant<int, 4>{}, 12);
}

// Transposes a tile of keys, which lie `stride` bytes apart, to words [dim / kPerWord][kKeyTile].
template <typename T>
void TurnTile(const char* keys, int64_t stride, int64_t dim, __m256i* to) {
  for (int64_t d = 0; d < dim; d += 4 * kPerWord<T>, keys += 16, to += 8) {
    for (int group = 0; group < 2; ++group) {
      __m256i words[4];
      TurnWords(keys + group * 8 * stride, stride, words);
      for (int w = 0; w < 4; ++w) {
        to[2 * w + group] = words[w];
      }
    }
  }
}

// Computes kChains of the two chains of the scores of kC columns, from chain kFirst on, with the keys that TurnTile has
// transposed. The second chain is added to the first.
template <typename T, int kC, int kFirst, int kChains>
[[gnu::noinline]] void ScoreWords(const __m256i* words, int64_t dim, const float* queries, float* scores) {
  Vec::F sum[kChains][kC][2];
  for (auto& chain : sum) {
    for (auto& column : chain) {
      column[0] = column[1] = Vec::Set(0.0f);
    }
  }
  for (int64_t d = 0; d < dim; d += kPerWord<T>, words += 2, queries += kPerWord<T> * kCols) {
    for (int i = kFirst; i < kPerWord<T>; i += 3 - kChains) {
      const Vec::F low = NumberOf<T>(words[0], i), high = NumberOf<T>(words[1], i);
      auto& chain = sum[kChains == 2 ? i % 2 : 0];
      for (int c = 0; c < kC; ++c) {
        const Vec::F q = Vec::Set(queries[i * kCols + c]);
        chain[c][0] = Vec::Fma(low, q, chain[c][0]);
        chain[c][1] = Vec::Fma(high, q, chain[c][1]);
      }
    }
  }
  for (int c = 0; c < kC; ++c) {
    for (int v = 0; v < 2; ++v) {
      float* to = scores + c * kSplit + v * 8;
      if (kChains == 2) {
        Vec::Store(to, Vec::Add(sum[0][c][v], sum[kChains - 1][c][v]));
      } else {
        Vec::Store(to, kFirst == 0 ? sum[0][c][v] : Vec::Add(Vec::Load(to), sum[0][c][v]));
      }
    }
  }
}

// Sixteen numbers of the cache as two vectors: of bf16 the even ones and the odd ones, of int8 the first 8 and the
// others.
inline void WidenTwo(const uint16_t* from, Vec::F& a, Vec::F& b) {
  const Vec::F pairs = Vec::Load(reinterpret_cast<const float*>(from));
  a = Vec::EvenHalves(pairs);
  b = Vec::OddHalves(pairs);
}
inline void WidenTwo(const int8_t* from, Vec::F& a, Vec::F& b) {
  a = Vec::Widen(from);
  b = Vec::Widen(from + 8);
}

// Adds kV times 16 dims of keys [from, to) of a tile, times their probabilities, to the sums of kC columns, which lie
// `dims` floats apart and in which 16 dims are as WidenTwo divides them.
template <typename T, int kC, int kV>
void SumFewDims(const char* values, int64_t stride, int64_t dims, int from, int to, const float* probabilities,
                float* sums) {
  Vec::F sum[kC][2 * kV];
  for (int c = 0; c < kC; ++c) {
    for (int v = 0; v < 2 * kV; ++v) {
      sum[c][v] = Vec::Load(sums + c * dims + v * 8);
    }
  }
  const char* at = values + from * stride;
  for (int key = from; key < to; ++key, at += stride) {
    Vec::F wide[2 * kV];
    for (int v = 0; v < kV; ++v) {
      WidenTwo(reinterpret_cast<const T*>(at) + v * 16, wide[2 * v], wide[2 * v + 1]);
    }
    for (int c = 0; c < kC; ++c) {
      const Vec::F p = Vec::Set(probabilities[c * kSplit + key]);
      for (int v = 0; v < 2 * kV; ++v) {
        sum[c][v] = Vec::Fma(wide[v], p, sum[c][v]);
      }
    }
  }
  for (int c = 0; c < kC; ++c) {
    for (int v = 0; v < 2 * kV; ++v) {
      Vec::Store(sums + c * dims + v * 8, sum[c][v]);
    }
  }
}

// Adds all dims of keys [from, to) of a tile, times their probabilities, to the sums of kC columns.
template <typename T, int kC>
void SumFewColumns(const char* values, int64_t stride, int64_t dims, int from, int to, const float* probabilities,
                   float* sums, Fetch* fetch) {
  constexpr int kV = kC == 1 ? 4 : kC == 2 ? 2 : 1;  // as many as the registers hold
  constexpr int64_t kBytes = 16 * sizeof(T);
  int64_t dim = 0;
  for (; dim + 16 * kV <= dims; dim += 16 * kV, values += kV * kBytes) {
    if (fetch) {
      fetch->Advance(kKeyTile * kV * kBytes);
    }
    SumFewDims<T, kC, kV>(values, stride, dims, from, to, probabilities, sums + dim);
  }
  for (; dim < dims; dim += 16, values += kBytes) {
    SumFewDims<T, kC, 1>(values, stride, dims, from, to, probabilities, sums + dim);
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

// Adds up the values of keys [from, to) times their probabilities, for `count` columns, tile by tile, because the first
// cache holds a tile.
template <typename T>
void SumLanes(const AttentionJob& job, int count, const char* const* values, int from, int to,
              const float* probabilities, float* sums, Fetch& fetch) {
  const int64_t stride = job.cache_row_bytes(), dims = job.value_dim;
  memset(sums, 0, count * dims * 4);
  for (int tile = from / kKeyTile * kKeyTile; tile < to; tile += kKeyTile) {
    const int low = Max(from - tile, 0), high = Min(to - tile, kKeyTile);
    InColumns(count, [&](auto columns, int first) {
      SumFewColumns<T, decltype(columns)::value>(values[tile / kKeyTile], stride, dims, low, high,
                                                 probabilities + first * kSplit + tile, sums + first * dims,
                                                 first == 0 ? &fetch : nullptr);
    });
  }
  if (sizeof(T) == 1) {
    return;
  }
  for (float* at = sums; at < sums + count * dims; at += 16) {
    const Vec::F even = Vec::Load(at), odd = Vec::Load(at + 8);
    const Vec::F low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
    Vec::Store(at, _mm256_permute2f128_ps(low, high, 0x20));
    Vec::Store(at + 8, _mm256_permute2f128_ps(low, high, 0x31));
  }
}

// Computes a split's sums for at most kFewColumns columns. T is the cache's kind of number.
template <typename T>
void AttendFewColumns(const AttentionJob& job, const Part& part, const Memory<Form::kWiden>& memory, Sums& sums,
                      Fetch& fetch_values, Fetch& fetch_next) {
  const Columns& c = memory.columns[0];
  const int64_t stride = job.cache_row_bytes();
  auto* words = reinterpret_cast<__m256i*>(memory.keys);
  for (int tile = part.first; tile < part.last; tile += kKeyTile) {
    fetch_values.Advance(kKeyTile * stride);
    TurnTile<T>(part.keys[tile / kKeyTile], stride, job.dim, words);
    InColumns(c.count, [&](auto columns, int first) {
      constexpr int kC = decltype(columns)::value, kChains = kC < 4 ? 2 : 1;  // as many as the registers hold
      const float* q = memory.queries + first;
      float* to = memory.scores + first * kSplit + tile;
      ScoreWords<T, kC, 0, kChains>(words, job.dim, q, to);
      if (kChains == 1) {
        ScoreWords<T, kC, 1, kChains>(words, job.dim, q, to);
      }
    });
  }
  ReadValueScales(job, part.values, part.from, part.to, memory);
  SoftmaxLanes(job, c, part, memory.scores, memory.probabilities, sums);
  SumLanes<T>(job, c.count, part.values, part.from, part.to, memory.probabilities, sums.values, fetch_next);
}

}  // namespace
}  // namespace penstock
