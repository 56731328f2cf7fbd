// The recurrences of state.h, for the instruction set of the including file.
//
// The state of a head is cut along its values into slices of up to four vectors, which are independent of each other. A
// slice goes through memory once for each token: the pass that writes the state after a token also sums the products
// that the next token needs of it. One pass before the first token only sums, and the one after the last only writes.
// Every number is made by the same operations in the same order in all of these passes.
#pragma once

#include <cmath>
#include <cstring>

#include "state/state.h"
#include "state/values.h"

namespace penstock {
namespace {

// What a token does to a head, apart from its values.
struct TokenGates {
  float decay, beta;
  float key_query;  // the product of key and query
};

// The state of a slice in memory: [key_dim] rows, `stride` floats apart.
struct Slice {
  float* at;
  int64_t stride;
};

// The sums over the keys' channels that a token needs: S^T k, unless the recurrence has no use for it, and S^T q.
template <int kVecs>
struct Sums {
  Vec::F of_key[kVecs], of_query[kVecs];

  void Clear() {
    for (int n = 0; n < kVecs; ++n) {
      of_key[n] = of_query[n] = Vec::Set(0.0f);
    }
  }
};

// Sums of the state as it is in memory.
template <int kVecs, bool kDelta>
inline void SumState(Slice state, int64_t dim, const float* key, const float* query, Sums<kVecs>& sums) {
  sums.Clear();
  for (int64_t i = 0; i < dim; ++i) {
    const Vec::F k = Vec::Set(key[i]), q = Vec::Set(query[i]);
    for (int n = 0; n < kVecs; ++n) {
      const Vec::F s = Vec::Load(state.at + i * state.stride + n * Vec::kWidth);
      if (kDelta) {
        sums.of_key[n] = Vec::Fma(s, k, sums.of_key[n]);
      }
      sums.of_query[n] = Vec::Fma(s, q, sums.of_query[n]);
    }
  }
}

inline Vec::F Updated(Vec::F state, Vec::F decay, Vec::F key, Vec::F update) {
  return Vec::Fma(key, update, Vec::Mul(state, decay));
}

// to = decay * from + key update^T. `past_caches`: `to` is not read soon, so its old contents need not be fetched.
template <int kVecs>
inline void UpdateState(Slice from, Slice to, int64_t dim, const float* key, float decay, const Vec::F* update,
                        bool past_caches) {
  const Vec::F d = Vec::Set(decay);
  for (int64_t i = 0; i < dim; ++i) {
    const Vec::F k = Vec::Set(key[i]);
    for (int n = 0; n < kVecs; ++n) {
      const Vec::F s = Updated(Vec::Load(from.at + i * from.stride + n * Vec::kWidth), d, k, update[n]);
      float* there = to.at + i * to.stride + n * Vec::kWidth;
      if (past_caches) {
        Vec::Stream(there, s);
      } else {
        Vec::Store(there, s);
      }
    }
  }
}

// Both at once: the sums are those of the next token.
template <int kVecs, bool kDelta>
inline void UpdateAndSum(Slice from, Slice to, int64_t dim, const float* key, float decay, const Vec::F* update,
                         const float* next_key, const float* next_query, Sums<kVecs>& sums) {
  const Vec::F d = Vec::Set(decay);
  sums.Clear();
  for (int64_t i = 0; i < dim; ++i) {
    const Vec::F k = Vec::Set(key[i]), next_k = Vec::Set(next_key[i]), next_q = Vec::Set(next_query[i]);
    for (int n = 0; n < kVecs; ++n) {
      const Vec::F s = Updated(Vec::Load(from.at + i * from.stride + n * Vec::kWidth), d, k, update[n]);
      Vec::Store(to.at + i * to.stride + n * Vec::kWidth, s);
      if (kDelta) {
        sums.of_key[n] = Vec::Fma(s, next_k, sums.of_key[n]);
      }
      sums.of_query[n] = Vec::Fma(s, next_q, sums.of_query[n]);
    }
  }
}

inline void CopySlice(Slice from, Slice to, int64_t dim, int64_t values) {
  for (int64_t i = 0; i < dim; ++i) {
    memcpy(to.at + i * to.stride, from.at + i * from.stride, values * sizeof(float));
  }
}

// A block of up to kStateBlock tokens of one head of a row.
struct Prepared {
  float* keys;     // [kStateBlock, key_dim]
  float* queries;  // [kStateBlock, key_dim]
  TokenGates gates[kStateBlock];
};

// x [size] in float32 to `to`; returns the sum of squares.
template <typename Value>
float Widened(const Value* x, int64_t size, float* to) {
  Vec::F squares = Vec::Set(0.0f);
  for (int64_t i = 0; i < size; i += Vec::kWidth) {
    const Vec::F value = LoadValues(x + i);
    Vec::Store(to + i, value);
    squares = Vec::Fma(value, value, squares);
  }
  return Total(squares);
}

inline void Scale(float* x, int64_t size, float factor) {
  for (int64_t i = 0; i < size; i += Vec::kWidth) {
    Vec::Store(x + i, Vec::Mul(Vec::Load(x + i), Vec::Set(factor)));
  }
}

inline float Product(const float* a, const float* b, int64_t size) {
  Vec::F sum = Vec::Set(0.0f);
  for (int64_t i = 0; i < size; i += Vec::kWidth) {
    sum = Vec::Fma(Vec::Load(a + i), Vec::Load(b + i), sum);
  }
  return Total(sum);
}

inline float Softplus(float x) { return (x > 0.0f ? x : 0.0f) + std::log1p(std::exp(-std::fabs(x))); }

inline TokenGates GatesOf(const RecurrenceJob& job, int64_t token, int64_t head) {
  const float rate = std::exp(job.a_log[head]), bias = job.dt_bias[head];
  if (job.delta) {
    const float* logits = job.logits + token * 2 * job.heads;
    const float time = Softplus(logits[job.heads + head] + bias);
    return {std::exp(-rate * time), 1.0f / (1.0f + std::exp(-logits[head])), 0.0f};
  }
  const float time = Softplus(job.logits[token * job.heads + head] + bias);
  const float bounded = time < job.dt_low ? job.dt_low : (time > job.dt_high ? job.dt_high : time);
  return {std::exp(-rate * bounded), bounded, 0.0f};
}

template <typename Value>
void PrepareToken(const RecurrenceJob& job, int64_t token, int64_t head, int64_t i, Prepared& block) {
  constexpr float kEps = 1e-6f;
  const int64_t dim = job.key_dim, key_head = head / (job.heads / job.key_heads);
  const Value* mixed = reinterpret_cast<const Value*>(job.mixed) + token * job.width + key_head * dim;
  float *key = block.keys + i * dim, *query = block.queries + i * dim;
  const float key_squares = Widened(mixed + job.key_at, dim, key);
  const float query_squares = Widened(mixed + job.query_at, dim, query);
  if (job.delta) {
    Scale(key, dim, 1.0f / std::sqrt(key_squares + kEps));
    Scale(query, dim, 1.0f / (std::sqrt(query_squares + kEps) * std::sqrt(static_cast<float>(dim))));
  }
  block.gates[i] = GatesOf(job, token, head);
  block.gates[i].key_query = Product(key, query, dim);
}

// Tokens [begin, begin + count) of a row, prepared in `block`, through the kVecs vectors of values from `low` on.
// `from` is the state before them, `work` where the state between tokens goes, and `to` where the last goes.
template <typename Value, int kVecs, bool kDelta>
void RunSlice(const RecurrenceJob& job, const StateRow& row, int64_t head, int64_t low, int64_t begin, int64_t count,
              const Prepared& block, Slice from, Slice work, Slice to, bool past_caches) {
  const int64_t dim = job.key_dim;
  const auto* values = reinterpret_cast<const Value*>(job.mixed) + job.value_at + head * job.value_dim + low;
  const Vec::F skip = Vec::Set(job.skip ? job.skip[head] : 0.0f);
  Sums<kVecs> sums;
  SumState<kVecs, kDelta>(from, dim, block.keys, block.queries, sums);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = row.first + begin + i;
    const TokenGates& gates = block.gates[i];
    const Vec::F decay = Vec::Set(gates.decay), beta = Vec::Set(gates.beta), both = Vec::Set(gates.key_query);
    float* y = job.y + (token * job.heads + head) * job.value_dim + low;
    Vec::F update[kVecs];
    for (int n = 0; n < kVecs; ++n) {
      const Vec::F value = LoadValues(values + token * job.width + n * Vec::kWidth);
      const Vec::F target = kDelta ? Vec::Sub(value, Vec::Mul(decay, sums.of_key[n])) : value;
      update[n] = Vec::Mul(beta, target);
      const Vec::F out = Vec::Fma(both, update[n], Vec::Mul(decay, sums.of_query[n]));
      Vec::Store(y + n * Vec::kWidth, kDelta ? out : Vec::Fma(skip, value, out));
    }
    const float* key = block.keys + i * dim;
    const bool last = i + 1 == count;
    const Slice after = last ? to : work;
    if (last) {
      UpdateState<kVecs>(from, to, dim, key, gates.decay, update, past_caches);
    } else {
      UpdateAndSum<kVecs, kDelta>(from, work, dim, key, gates.decay, update, key + dim, block.queries + (i + 1) * dim,
                                  sums);
    }
    if (begin + i + 1 == row.cut) {
      const int64_t entry = (row.cut_to * job.heads + head) * dim * job.value_dim;
      CopySlice(after, {job.state + entry + low, job.value_dim}, dim, kVecs * Vec::kWidth);
    }
    from = work;
  }
}

template <typename Value, bool kDelta>
void RunHead(const RecurrenceJob& job, const StateRow& row, int64_t head, int64_t low, int64_t high, char* scratch) {
  const int64_t dim = job.key_dim, size = dim * job.value_dim;
  auto* work = reinterpret_cast<float*>(scratch);
  Prepared block;
  block.keys = work + dim * (high - low);
  block.queries = block.keys + kStateBlock * dim;
  if (row.from < 0) {
    memset(work, 0, dim * (high - low) * sizeof(float));
  }
  for (int64_t begin = 0; begin < row.count; begin += kStateBlock) {
    const int64_t count = Min(kStateBlock, row.count - begin);
    for (int64_t i = 0; i < count; ++i) {
      PrepareToken<Value>(job, row.first + begin + i, head, i, block);
    }
    const bool ends = begin + count == row.count;
    for (int64_t at = low, width; at < high; at += width) {
      width = high - at >= 4 * Vec::kWidth ? 4 * Vec::kWidth : (high - at >= 2 * Vec::kWidth ? 2 : 1) * Vec::kWidth;
      const Slice inside{work + (at - low) * dim, width};
      const auto entry = [&](int64_t number) {
        return Slice{job.state + (number * job.heads + head) * size + at, job.value_dim};
      };
      const Slice from = begin == 0 && row.from >= 0 ? entry(row.from) : inside;
      const Slice to = ends && row.to >= 0 ? entry(row.to) : inside;
      const bool past_caches = job.aligned && to.at != inside.at;
      const auto run = width == 4 * Vec::kWidth   ? RunSlice<Value, 4, kDelta>
                       : width == 2 * Vec::kWidth ? RunSlice<Value, 2, kDelta>
                                                  : RunSlice<Value, 1, kDelta>;
      run(job, row, head, at, begin, count, block, from, inside, to, past_caches);
    }
  }
  _mm_sfence();  // what went past the caches is seen by whoever sees that this call is done
}

inline void Recur(const RecurrenceJob& job, const StateRow& row, int64_t head, int64_t low, int64_t high,
                  char* scratch) {
  const TinyIsZero tiny_is_zero;
  const auto run = job.bf16 ? (job.delta ? RunHead<uint16_t, true> : RunHead<uint16_t, false>)
                            : (job.delta ? RunHead<float, true> : RunHead<float, false>);
  run(job, row, head, low, high, scratch);
}

}  // namespace
}  // namespace penstock
