// The products of attention_lanes.h on AVX-512, where a vector has 16 lanes. A score's lanes are keys, so tiles of keys
// are transposed.
#pragma once

#include "attention/attention_lanes.h"
#include "common/transpose.h"

namespace penstock {
namespace {

// How many numbers of the cache, bf16 or int8, are in a word.
template <typename T>
constexpr int kPerWord = 4 / sizeof(T);

// Number i of each word, widened.
template <typename T>
inline __m512 NumberOf(__m512i words, int i);
template <>
inline __m512 NumberOf<uint16_t>(__m512i words, int i) {
  return i == 0 ? Vec::EvenHalves(_mm512_castsi512_ps(words)) : Vec::OddHalves(_mm512_castsi512_ps(words));
}
template <>
inline __m512 NumberOf<int8_t>(__m512i words, int i) {
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, static_cast<unsigned>(24 - 8 * i)), 24));
}

// Transposes the dims from `d` on, as many as 16 words have, of 16 keys, which lie `stride` bytes apart: words[i] holds
// dims d + kPerWord i and following of all keys. Returns the number of words, a multiple of 4.
template <typename T>
int TurnedWords(const char* keys, int64_t stride, int64_t dim, int64_t d, __m512i* words) {
  const int count = static_cast<int>(Min<int64_t>(16, (dim - d) / kPerWord<T>));  // dims are a multiple of 16
  const auto kept = static_cast<__mmask16>((1u << count) - 1);
  for (int key = 0; key < kKeyTile; ++key) {
    words[key] = _mm512_maskz_loadu_epi32(kept, keys + key * stride + d * static_cast<int64_t>(sizeof(T)));
  }
  Transpose16(words);
  return count;
}

// Transposes a tile of keys, which lie `stride` bytes apart, to float [dim][kKeyTile].
template <typename T>
void TurnKeys(const char* keys, int64_t stride, int64_t dim, float* to) {
  for (int64_t d = 0; d < dim; d += 16 * kPerWord<T>) {
    __m512i words[16];
    const int count = TurnedWords<T>(keys, stride, dim, d, words);
    for (int w = 0; w < count; ++w) {
      for (int i = 0; i < kPerWord<T>; ++i, to += kKeyTile) {
        _mm512_storeu_ps(to, NumberOf<T>(words[w], i));
      }
    }
  }
}

// Computes the scores of a transposed tile of keys for all columns.
inline void ScoreTurned(const float* keys, int64_t dim, const float* queries, float* scores) {
  __m512 sum[kCols];
  for (auto& s : sum) {
    s = _mm512_setzero_ps();
  }
  for (int64_t d = 0; d < dim; ++d, keys += kKeyTile, queries += kCols) {
    const __m512 key = _mm512_loadu_ps(keys);
    for (int c = 0; c < kCols; ++c) {
      sum[c] = _mm512_fmadd_ps(key, _mm512_set1_ps(queries[c]), sum[c]);
    }
  }
  for (int c = 0; c < kCols; ++c) {
    _mm512_storeu_ps(scores + c * kSplit, sum[c]);
  }
}

// Computes the scores of kTiles tiles of keys for kC columns, in kC chains of products. For few columns, two tiles side
// by side keep the FMA units busy.
template <typename T, int kC, int kTiles>
void ScoreFewTiles(const char* const* keys, int64_t stride, int64_t dim, const float* queries, float* scores) {
  __m512 sum[kTiles][kC];
  for (auto& tile : sum) {
    for (auto& s : tile) {
      s = _mm512_setzero_ps();
    }
  }
  for (int64_t d = 0; d < dim; d += 16 * kPerWord<T>) {
    for (int t = 0; t < kTiles; ++t) {
      __m512i words[16];
      const int count = TurnedWords<T>(keys[t], stride, dim, d, words);
      const float* q = queries + d * kCols;
      const auto add = [&](int begin) {
        for (int w = begin; w < begin + 4; ++w) {
          for (int i = 0; i < kPerWord<T>; ++i, q += kCols) {
            const __m512 key = NumberOf<T>(words[w], i);
            for (int c = 0; c < kC; ++c) {
              sum[t][c] = _mm512_fmadd_ps(key, _mm512_set1_ps(q[c]), sum[t][c]);
            }
          }
        }
      };
      // The places of words are known to the compiler, so that they stay in registers.
      add(0);
      if (count > 4) {
        add(4);
      }
      if (count > 8) {
        add(8);
      }
      if (count > 12) {
        add(12);
      }
    }
  }
  for (int t = 0; t < kTiles; ++t) {
    for (int c = 0; c < kC; ++c) {
      _mm512_storeu_ps(scores + c * kSplit + t * kKeyTile, sum[t][c]);
    }
  }
}

// Computes the scores of tiles [begin, end).
template <typename T, int kC>
void ScoreFew(const char* const* keys, int64_t stride, int64_t dim, const float* queries, int begin, int end,
              float* scores, Fetch& fetch) {
  constexpr int kAtOnce = kC <= 4 ? 2 : 1;
  int tile = begin;
  for (; tile + kAtOnce <= end; tile += kAtOnce) {
    for (int i = 0; i < kAtOnce; ++i) {
      fetch.Advance();
    }
    ScoreFewTiles<T, kC, kAtOnce>(keys + tile, stride, dim, queries, scores + tile * kKeyTile);
  }
  if (tile == end) {
    return;
  }
  fetch.Advance();
  ScoreFewTiles<T, kC, 1>(keys + tile, stride, dim, queries, scores + tile * kKeyTile);
}

// Thirty-two numbers of the cache as two vectors: of bf16 the even ones and the odd ones, of int8 the first 16 and the
// others.
inline void WidenTwo(const uint16_t* from, __m512& a, __m512& b) {
  const __m512 pairs = Vec::Load(reinterpret_cast<const float*>(from));
  a = Vec::EvenHalves(pairs);
  b = Vec::OddHalves(pairs);
}
inline void WidenTwo(const int8_t* from, __m512& a, __m512& b) {
  a = Vec::Widen(from);
  b = Vec::Widen(from + 16);
}

// A split's values: `dims` numbers of each key, whose rows begin every `stride` bytes.
struct ValueTiles {
  const char* const* tiles;
  int64_t stride, dims;
};

// out[col][dim ..] for kC columns and kV times 32 dims: the sum over keys [from, to) of probability times value.
template <typename T, int kC, int kV>
void SumFewDims(const ValueTiles& values, int64_t dim, int from, int to, const float* probabilities, float* out,
                Fetch* fetch) {
  __m512 sum_a[kC][kV], sum_b[kC][kV];  // as WidenTwo divides them
  for (int c = 0; c < kC; ++c) {
    for (int v = 0; v < kV; ++v) {
      sum_a[c][v] = sum_b[c][v] = _mm512_setzero_ps();
    }
  }
  for (int key = from; key < to;) {
    if (fetch) {
      fetch->Advance(), fetch->Advance();
    }
    const int tile = key / kKeyTile, stop = Min(to, (tile + 1) * kKeyTile);
    const char* value = values.tiles[tile] + (key - tile * kKeyTile) * values.stride;
    for (; key < stop; ++key, value += values.stride) {
      __m512 a[kV], b[kV];
      for (int v = 0; v < kV; ++v) {
        WidenTwo(reinterpret_cast<const T*>(value) + dim + v * 32, a[v], b[v]);
      }
      for (int c = 0; c < kC; ++c) {
        const __m512 p = _mm512_set1_ps(probabilities[c * kSplit + key]);
        for (int v = 0; v < kV; ++v) {
          sum_a[c][v] = _mm512_fmadd_ps(a[v], p, sum_a[c][v]);
        }
        for (int v = 0; v < kV; ++v) {
          sum_b[c][v] = _mm512_fmadd_ps(b[v], p, sum_b[c][v]);
        }
      }
    }
  }
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (int c = 0; c < kC; ++c) {
    for (int v = 0; v < kV; ++v) {
      float* at = out + c * values.dims + dim + v * 32;
      const bool apart = sizeof(T) == 2;
      _mm512_storeu_ps(at, apart ? _mm512_permutex2var_ps(sum_a[c][v], first, sum_b[c][v]) : sum_a[c][v]);
      _mm512_storeu_ps(at + 16, apart ? _mm512_permutex2var_ps(sum_a[c][v], second, sum_b[c][v]) : sum_b[c][v]);
    }
  }
}

// SumFewDims for the last 16 dims, if the number of dims is not a multiple of 32.
template <typename T, int kC>
void SumFewTail(const ValueTiles& values, int from, int to, const float* probabilities, float* out) {
  __m512 sum[kC];
  for (auto& s : sum) {
    s = _mm512_setzero_ps();
  }
  for (int key = from; key < to; ++key) {
    const char* value = values.tiles[key / kKeyTile] + key % kKeyTile * values.stride;
    const __m512 wide = Vec::Widen(reinterpret_cast<const T*>(value) + values.dims - 16);
    for (int c = 0; c < kC; ++c) {
      sum[c] = _mm512_fmadd_ps(wide, _mm512_set1_ps(probabilities[c * kSplit + key]), sum[c]);
    }
  }
  for (int c = 0; c < kC; ++c) {
    _mm512_storeu_ps(out + c * values.dims + values.dims - 16, sum[c]);
  }
}

template <typename T, int kC>
void SumFew(const ValueTiles& values, int from, int to, const float* probabilities, float* out, Fetch& fetch) {
  constexpr int kV = kC <= 2 ? 4 : kC <= 4 ? 2 : 1;  // as many as the registers hold
  int64_t dim = 0;
  for (; dim + 32 * kV <= values.dims; dim += 32 * kV) {
    SumFewDims<T, kC, kV>(values, dim, from, to, probabilities, out, dim == 0 ? &fetch : nullptr);
  }
  for (; dim + 32 <= values.dims; dim += 32) {
    SumFewDims<T, kC, 1>(values, dim, from, to, probabilities, out, dim == 0 ? &fetch : nullptr);
  }
  if (dim < values.dims) {
    SumFewTail<T, kC>(values, from, to, probabilities, out);
  }
}

// Computes a split's sums for at most kC columns; those beyond c.count have queries and probabilities of 0. T is the
// cache's kind of number.
template <typename T, int kC>
void AttendSome(const AttentionJob& job, const Columns& c, const float* queries, const Part& part,
                const Memory<Form::kWiden>& memory, Sums& sums, Fetch& fetch_values, Fetch& fetch_next) {
  float *scores = memory.scores, *probabilities = memory.probabilities;
  const int64_t stride = job.cache_row_bytes();
  ScoreFew<T, kC>(part.keys, stride, job.dim, queries, part.first / kKeyTile, part.last / kKeyTile, scores,
                  fetch_values);
  ReadValueScales(job, part.values, part.from, part.to, memory);
  SoftmaxLanes(job, c, part, scores, probabilities, sums, fetch_values);
  for (int col = c.count; col < kC; ++col) {
    memset(probabilities + col * kSplit, 0, kSplit * sizeof(float));
  }
  SumFew<T, kC>({part.values, stride, job.value_dim}, part.from, part.to, probabilities, sums.values, fetch_next);
}

// Computes a split's sums for at most kDirectColumns columns.
template <typename T>
void AttendDirect(const AttentionJob& job, const Columns& c, const float* queries, const Part& part,
                  const Memory<Form::kWiden>& memory, Sums& sums, Fetch& fetch_values, Fetch& fetch_next) {
  auto* attend = c.count > 4 ? AttendSome<T, 8> : c.count > 2 ? AttendSome<T, 4> : AttendSome<T, 2>;
  if (c.count == 1) {
    attend = AttendSome<T, 1>;
  }
  attend(job, c, queries, part, memory, sums, fetch_values, fetch_next);
}

}  // namespace
}  // namespace penstock
