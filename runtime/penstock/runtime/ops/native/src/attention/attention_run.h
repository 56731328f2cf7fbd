// Runs a unit of work, from its queries to its output, for one form of multiplication.
#pragma once

#include "attention/attention_kernel.h"
#include "attention/attention_lanes.h"

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
  } else if constexpr (kKeyLanes<kForm>) {
#ifdef __AVX512F__
    for (int tile = begin; tile < end; ++tile) {
      fetch.Advance();
      ScoreTurned(reinterpret_cast<const float*>(keys[tile]), dim, queries, scores + tile * kKeyTile);
    }
#endif
  } else {
    for (int tile = begin; tile < end; ++tile) {
      fetch.Advance();
      float* out = scores + tile * kKeyTile * kCols;
      if (cols > Vec::kWidth) {
        ScoreKeys<kCols / Vec::kWidth, Paired(kForm)>(keys[tile], words * 4, queries, words, out);
      } else {
        ScoreKeys<1, Paired(kForm)>(keys[tile], words * 4, queries, words, out);
      }
    }
  }
}

// Converts keys [begin, end) of a split to the form in which they are scored, at `memory.keys`, unless they are used in
// place.
template <Form kForm>
void PrepareKeys(const AttentionJob& job, const char** keys, int begin, int end, Memory<kForm>& memory, Fetch& fetch) {
  const int64_t dim = job.dim, stride = job.cache_row_bytes();
  if (kForm != Form::kWiden && !job.int8) {
    return;
  }
  for (int at = begin / kKeyTile * kKeyTile; at < end; at += kKeyTile) {
    const char* from = keys[at / kKeyTile];
    float* to = memory.keys + at * dim / (Paired(kForm) ? 2 : 1);
    if constexpr (kKeyLanes<kForm>) {
#ifdef __AVX512F__
      job.int8 ? TurnKeys<int8_t>(from, stride, dim, to) : TurnKeys<uint16_t>(from, stride, dim, to);
#endif
    } else if constexpr (Paired(kForm)) {
      Bf16Rows(from, kKeyTile, stride, dim, reinterpret_cast<uint16_t*>(to));
    } else if (job.int8) {
      WidenRows<int8_t>(from, kKeyTile, stride, dim, to);
    } else {
      WidenRows<uint16_t>(from, kKeyTile, stride, dim, to);
    }
    keys[at / kKeyTile] = reinterpret_cast<const char*>(to);
    if (job.int8) {
      fetch.Advance();
    }
  }
}

template <Form kForm>
void SoftmaxOf(const AttentionJob& job, const Columns& c, const Part& part, float* scores, float* out, Sums& sums,
               Fetch& fetch) {
  if constexpr (kKeyLanes<kForm>) {
#ifdef __AVX512F__
    SoftmaxLanes(job, c, part, scores, out, sums, fetch);
#endif
  } else {
    Softmax<kForm>(job, c, part, scores, out, sums, fetch);
  }
}

template <Form kForm>
void AttendFew(const AttentionJob& job, const Part& part, const Memory<kForm>& memory, Sums& sums, Fetch& fetch_values,
               Fetch& fetch_next) {
#ifdef __AVX512F__
  if constexpr (kKeyLanes<kForm>) {
    auto* attend = job.int8 ? AttendFewColumns<int8_t> : AttendFewColumns<uint16_t>;
    attend(job, part, memory, sums, fetch_values, fetch_next);
  }
#endif
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
  constexpr int kStep = Paired(kForm) ? 2 * kKeyTile : kKeyTile;  // AMX sums 32 keys at once
  for (int at = begin / kStep * kStep; at < (end + kStep - 1) / kStep * kStep; at += kKeyTile) {
    const int tile = at / kKeyTile, low = Max(begin - at, 0), high = Min(end - at, kKeyTile);
    fetch.Advance();
    if constexpr (!Paired(kForm)) {
      float* to = memory.values + at * dim;
      auto* widen = job.int8 ? WidenRows<int8_t> : WidenRows<uint16_t>;
      widen(values[tile] + low * stride, high - low, stride, dim, to + low * dim);
      values[tile] = reinterpret_cast<const char*>(to);
    } else {
      auto* to = reinterpret_cast<uint32_t*>(memory.values) + at / 2 * dim;
      const bool held = low < high, tiled = kForm == Form::kTiles;
      if (tiled && at % 32) {
        to = to - 8 * dim + 8 * kCols;  // goes to the lower half of the tiles of 16 pairs
      }
      auto* pair = job.int8 ? PairValues<int8_t> : PairValues<uint16_t>;
      pair(values[tile], stride, dim, held ? low : 0, held ? high : 0, tiled ? 256 : 16, tiled ? kCols : dim, to);
      values[tile] = reinterpret_cast<const char*>(to);
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
    constexpr int kPer = Paired(kForm) ? 2 : 1;
    const bool in_place = kForm == Form::kFloat && !job.int8;
    const int64_t row_words = in_place ? job.dim : job.value_dim;
    const ValueRows rows{values, row_words * 4, kKeyTile / kPer, begin / kPer, (end + kPer - 1) / kPer};
    constexpr Order kOrder = kKeyLanes<kForm> ? Order::kColumns : Order::kRows;
    SumValues<Paired(kForm), kOrder>(rows, memory.probabilities, cols, job.value_dim, sums[0].values);
  }
}

template <Form kForm>
void RunUnit(const AttentionJob& job, const AttentionUnit& unit, const AttentionUnit& next, char* scratch) {
  const AttentionTask& task = *unit.task;
  const int64_t dim = job.dim, value_dim = job.value_dim;
  const int64_t columns = task.column_end - task.column_begin, tiles = (columns + kCols - 1) / kCols;
  Carver carver(scratch);
  Memory<kForm> memory(job, tiles, carver);
  memory.Link(tiles, value_dim);
  Sums* split_sums = memory.sums + tiles;
  for (int64_t t = 0; t < tiles; ++t) {
    LoadColumns<kForm>(job, task, unit.kv_head, task.column_begin + static_cast<int>(t * kCols), memory.columns[t],
                       memory.queries + t * memory.query_words * kCols);
    if (!task.partial) {
      Clear(memory.sums[t], value_dim);
    }
  }
  int low, high;
  Range(job, task, &low, &high);
  for (int split = task.split_begin; split < task.split_end; ++split) {
    const int start = split * kSplit, begin = Max(low - start, 0), end = Min(high - start, kSplit);
    const char *keys[kSplitTiles] = {}, *values[kSplitTiles] = {}, *ahead[kSplitTiles] = {};
    FindTiles(job, task, unit.kv_head, start, begin, end, 0, keys);
    FindTiles(job, task, unit.kv_head, start, begin, end, 1, values);
    const bool last = split + 1 == task.split_end;
    if (!last || next.task) {
      const AttentionTask& then = last ? *next.task : task;
      int then_low = low, then_high = high;
      if (last) {
        Range(job, then, &then_low, &then_high);
      }
      const int then_start = (last ? then.split_begin : split + 1) * kSplit;
      FindTiles(job, then, last ? next.kv_head : unit.kv_head, then_start, Max(then_low - then_start, 0),
                Min(then_high - then_start, kSplit), 0, ahead);
    }
    const char* raw_values[kSplitTiles] = {};
    if (!job.keys_only) {
      memcpy(raw_values, values, sizeof(values));
    }
    const bool few = kKeyLanes<kForm> && columns <= kFewColumns;
    // While the first columns use the keys, the values of these keys are prefetched; afterwards the next keys are. The
    // scales of int8 values are needed before the softmax.
    const int64_t tile_bytes = kKeyTile * job.cache_row_bytes(), steps = (end - begin + kKeyTile - 1) / kKeyTile;
    const int value_steps = !job.int8 ? 3 : few ? 1 : 2;
    Fetch fetch_values(raw_values, tile_bytes, value_steps * steps), fetch_next(ahead, tile_bytes, 2 * steps);
    if (job.int8) {
      ReadScales(job, keys, begin, end, memory.key_scales);
    }
    if (!few) {
      PrepareKeys<kForm>(job, keys, begin, end, memory, fetch_values);
    }
    bool prepared = false;
    for (int64_t t = 0; t < tiles; t += kWide<kForm>) {
      const int wide = Min(kWide<kForm>, static_cast<int>(tiles - t));
      int oldest = INT32_MAX, newest = -1;
      for (int w = 0; w < wide; ++w) {
        oldest = Min(oldest, memory.columns[t + w].min_oldest);
        newest = Max(newest, memory.columns[t + w].max_newest);
      }
      int from = Max(oldest - start, begin), to = Min(newest + 1 - start, end);
      const bool empty = from >= to;
      if (!empty) {
        const int first = from / kKeyTile * kKeyTile, last = (to + kKeyTile - 1) / kKeyTile * kKeyTile;
        const Part part{keys,
                        values,
                        start,
                        first,
                        last,
                        from,
                        to,
                        job.int8 ? memory.key_scales : nullptr,
                        job.int8 ? memory.value_scales : nullptr};
        if (few) {
          AttendFew<kForm>(job, part, memory, split_sums[0], fetch_values, fetch_next);
        } else {
          ScoreAll<kForm>(keys, job, memory.queries + t * memory.query_words * kCols, wide, memory.columns[t].count,
                          first / kKeyTile, last / kKeyTile, memory.scores, fetch_values);
          if (!prepared) {
            ReadValueScales(job, values, begin, end, memory);
          }
          for (int w = 0; w < wide; ++w) {
            SoftmaxOf<kForm>(job, memory.columns[t + w], part, memory.scores + w * kSplit * kCols, memory.probabilities,
                             split_sums[w], fetch_values);
#ifdef PENSTOCK_HAS_TILES
            if constexpr (kForm == Form::kTiles) {
              Turn(reinterpret_cast<uint32_t*>(memory.probabilities), first, last,
                   memory.turned + w * kSplit / 2 * kCols);
            }
#endif
          }
          if (!prepared) {
            PrepareValues<kForm>(job, values, begin, end, memory, fetch_next);
          }
          prepared = true;
          // The values of keys outside the range must not be multiplied. In pairs of bf16 they are 0.
          if (Paired(kForm)) {
            from = first, to = last;
          }
          SumAll<kForm>(values, job, wide, memory.columns[t].count, from, to, memory, split_sums, fetch_next);
        }
      }
      for (int w = 0; w < wide; ++w) {
        const Columns& c = memory.columns[t + w];
        if (task.partial) {
          StorePartials(job, c, split_sums[w], empty, split, unit.kv_head);
        } else if (!empty) {
          Merge(memory.sums[t + w], split_sums[w], c.count, value_dim);
        }
      }
    }
  }
  if (!task.partial) {
    for (int64_t t = 0; t < tiles; ++t) {
      const Columns& c = memory.columns[t];
      for (int col = 0; col < c.count; ++col) {
        WriteColumn(job, memory.sums[t], col, c.token[col], c.head[col]);
      }
    }
    return;
  }
  for (int i = 0; i < task.count; ++i) {
    const int32_t token = job.members[task.first + i];
    const int begin = Max(task.split_begin, job.oldest[token] / kSplit);
    const int end = Min(task.split_end, job.positions[token] / kSplit + 1);
    if (begin < end) {
      FinishToken(job, token, unit.kv_head, end - begin, memory.sums[0]);
    }
  }
}

template <Form kForm>
int64_t ScratchBytes(const AttentionJob& job, int64_t tiles) {
  Carver carver(nullptr);
  Memory<kForm> memory(job, tiles, carver);
  return carver.used();
}

inline void Nothing() {}

// scratch_bytes and run of a kernel without tiles, in which kBf16 is the form of bf16 numbers.
template <Form kBf16>
int64_t VectorBytes(const AttentionJob& job, int64_t tiles) {
  return job.bf16 ? ScratchBytes<kBf16>(job, tiles) : ScratchBytes<Form::kFloat>(job, tiles);
}

template <Form kBf16>
void VectorRun(const AttentionJob& job, const AttentionUnit& unit, const AttentionUnit& next, char* scratch) {
  if (job.bf16) {
    RunUnit<kBf16>(job, unit, next, scratch);
  } else {
    RunUnit<Form::kFloat>(job, unit, next, scratch);
  }
}

}  // namespace
}  // namespace penstock
