// Parts of the linear kernels that are compiled once per instruction set. In an unnamed namespace, like lanes.h.
#pragma once

#include <cstring>

#include "common/activate.h"
#include "common/common.h"
#include "common/int8.h"
#include "common/lanes.h"
#include "common/rms.h"
#include "common/vec.h"
#include "linear/linear.h"
#include "linear/linear_adapted.h"

namespace penstock {
namespace {

inline Lanes TanhOf(Lanes x) {
  float values[kBlockOut];
  Store(values, x);
  for (int64_t i = 0; i < kBlockOut; i += Vec::kWidth) {
    Vec::Store(values + i, Tanh(Vec::Load(values + i)));
  }
  return Load(values);
}

// The out blocks of a unit of work: `count` blocks of one weight, from `block` on.
struct UnitBlocks {
  int64_t weight, block, count;
};

inline int64_t UnitsOf(const PackedWeight& weight, int64_t per_unit) { return CeilDiv(weight.num_blocks, per_unit); }

inline int64_t CountUnits(const LinearJob& job, int64_t per_unit) {
  if (job.gated()) {
    return UnitsOf(job.weights[0], per_unit);
  }
  int64_t units = 0;
  for (int64_t w = 0; w < job.num_weights; ++w) {
    units += UnitsOf(job.weights[w], per_unit);
  }
  return units;
}

inline UnitBlocks FindUnit(const LinearJob& job, int64_t unit, int64_t per_unit) {
  int64_t w = 0;
  for (; !job.gated() && unit >= UnitsOf(job.weights[w], per_unit); ++w) {
    unit -= UnitsOf(job.weights[w], per_unit);
  }
  const int64_t block = unit * per_unit;
  return {w, block, Min(job.weights[w].num_blocks - block, per_unit)};
}

inline int64_t ColumnOf(const LinearJob& job, int64_t weight, int64_t block) {
  int64_t before = job.first_block + block;
  for (int64_t w = 0; w < weight; ++w) {
    before += job.weights[w].num_blocks;
  }
  return before * kBlockOut;
}

inline Lanes BiasOf(const PackedWeight& weight, int64_t block) {
  return weight.bias ? LoadBf16(weight.bias + block * kBlockOut) : Fill(0.0f);
}

// Begins to fetch what adapters add to `count` neighbours of a weight, or to a block of each of two; see FetchAdapters.
inline void FetchForBlocks(const LinearJob& job, int64_t weight, int64_t block, int64_t count, int64_t first,
                           int64_t last) {
  if (!job.adapted) {
    return;
  }
  if (job.gated()) {
    FetchAdapters(job, ColumnOf(job, 0, block), 1, first, last);
    FetchAdapters(job, ColumnOf(job, 1, block), 1, first, last);
  } else {
    FetchAdapters(job, ColumnOf(job, weight, block), count, first, last);
  }
}

// What a product with its bias becomes before the residual is added, for the operations that do more than multiply;
// `at` is its place in y. It is not inlined, because most operations have no use for it.
__attribute__((noinline)) inline Lanes Adjusted(const LinearJob& job, Lanes value, int64_t at) {
  if (job.up) {
    return Activate(job.activation, job.limit, value, LoadBf16(job.up + at));
  }
  value = Mul(value, Fill(job.scale));
  if (job.softcap == 0.0f) {
    return value;
  }
  return Mul(Fill(job.softcap), TanhOf(Div(value, Fill(job.softcap))));
}

// Writes results of `rows` rows, from `row` on, to y: `sums` [rows, 16] are the products with `block`, and `more`,
// unless it is null, those with the next block. Adapters are added to both in place.
inline void Finish(const LinearJob& job, int64_t weight, int64_t block, int64_t row, int64_t rows, float* sums,
                   float* more) {
  const int64_t column = ColumnOf(job, weight, block);
  if (job.adapted) {
    AddAdapters(job, column, row, rows, sums);
    if (more) {
      AddAdapters(job, column + kBlockOut, row, rows, more);
    }
  }
  const Lanes bias[2] = {BiasOf(job.weights[weight], block), BiasOf(job.weights[weight], more ? block + 1 : block)};
  const bool adjusted = job.up || job.scale != 1.0f || job.softcap != 0.0f;
  for (int64_t r = 0; r < rows; ++r) {
    // The two blocks of a row are written one after the other, because they are halves of a cache line.
    for (int64_t half = 0; half < (more ? 2 : 1); ++half) {
      const int64_t at = (row + r) * job.ldy + column + half * kBlockOut;
      Lanes value = Add(Load((half ? more : sums) + r * kBlockOut), bias[half]);
      if (adjusted) {
        value = Adjusted(job, value, at);
      }
      if (job.residual) {
        value = Add(value, LoadBf16(job.residual + at));
      }
      if (job.y_f32) {
        Store(job.y_f32 + at, value);
      } else {
        StoreBf16(job.y_bf16 + at, value);
      }
    }
  }
}

// Writes y = act(gate) * up for `rows` rows, from `row` on, and one block. Adapters are added to both in place.
inline void FinishGate(const LinearJob& job, int64_t block, int64_t row, int64_t rows, float* gates, float* ups) {
  if (job.adapted) {
    AddAdapters(job, ColumnOf(job, 0, block), row, rows, gates);
    AddAdapters(job, ColumnOf(job, 1, block), row, rows, ups);
  }
  const Lanes gate_bias = BiasOf(job.weights[0], block), up_bias = BiasOf(job.weights[1], block);
  uint16_t* out = job.y_bf16 + row * job.ldy + block * kBlockOut;
  for (int64_t r = 0; r < rows; ++r, out += job.ldy) {
    const Lanes gate = Add(Load(gates + r * kBlockOut), gate_bias), up = Add(Load(ups + r * kBlockOut), up_bias);
    StoreBf16(out, Activate(job.activation, job.limit, gate, up));
  }
}

// Makes the sums of `rows` rows with int8, from `row` on, of int32 sums [rows][upper, lower][16], in place: those with
// the upper and with the lower bytes of values of x, of which each row has a scale.
inline void Dequantize(const LinearJob& job, int64_t weight, int64_t block, int64_t row, int64_t rows, float* sums) {
  const Lanes scale = Load(job.weights[weight].scale + block * kBlockOut);
  for (int64_t r = 0; r < rows; ++r) {
    int32_t whole[2 * kBlockOut];
    float value[2 * kBlockOut];
    memcpy(whole, sums + 2 * r * kBlockOut, sizeof whole);
    for (int64_t i = 0; i < 2 * kBlockOut; ++i) {
      value[i] = static_cast<float>(whole[i]);
    }
    const Lanes sum = MulAdd(Load(value), Fill(256.0f), Load(value + kBlockOut));
    Store(sums + r * kBlockOut, Mul(sum, Mul(Fill(job.x_scale[row + r]), scale)));
  }
}

// Multiplies the sums of `rows` rows by the factors of a block's outputs, in place.
inline void MultiplyByFactors(const float* factors, int64_t rows, float* sums) {
  const Lanes of_outputs = Load(factors);
  for (int64_t r = 0; r < rows; ++r) {
    Store(sums + r * kBlockOut, Mul(Load(sums + r * kBlockOut), of_outputs));
  }
}

// Calls put(channel, values) for all channels of a row of x in float32, 16 at a time, in order: times the row's factor,
// and normalised by its root mean square if there is a norm (Zhang and Sennrich 2019).
template <typename Put>
inline void EachOfRow(const LinearInput& input, int64_t row, int64_t k, Put&& put) {
  const uint16_t* x = input.RowAt(row);
  const Lanes factor = Fill(input.factors ? input.factors[row] : 1.0f);
  if (!input.norm) {
    for (int64_t i = 0; i < k; i += 16) {
      put(i, Mul(LoadBf16(x + i), factor));
    }
    return;
  }
  Lanes squares = Fill(0.0f);
  for (int64_t i = 0; i < k; i += 16) {
    const Lanes value = Mul(LoadBf16(x + i), factor);
    squares = Add(squares, Mul(value, value));
  }
  const Lanes scale = Fill(InverseRms(squares, k, input.eps)), offset = Fill(input.offset);
  for (int64_t i = 0; i < k; i += 16) {
    const Lanes value = Mul(LoadBf16(x + i), factor);
    put(i, Mul(Mul(value, scale), Add(offset, LoadBf16(input.norm + i))));
  }
}

// The row as float32 [k].
inline void LoadRow(const LinearInput& input, int64_t row, int64_t k, float* out) {
  EachOfRow(input, row, k, [&](int64_t i, Lanes value) { Store(out + i, value); });
}

}  // namespace
}  // namespace penstock
