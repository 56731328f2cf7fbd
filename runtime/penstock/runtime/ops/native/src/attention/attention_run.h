// Runs a unit of work, from its queries to its output, for one form of multiplication.
#pragma once

#include "attention/attention_lanes.h"
#include "attention/attention_results.h"
#include "attention/attention_split.h"

namespace penstock {
namespace {

// Computes a split's sums for `wide` tiles of columns from `c` on, whose queries are `queries`, by way of copies of
// keys and values where their form differs from the cache's. The keys' are there; the values' are made for the first
// columns that need them, which `prepared` records.
template <Form kForm>
void AttendCopies(const AttentionJob& job, const Columns* c, const float* queries, const Part& part, int wide,
                  const char** values, int begin, int end, bool& prepared, Memory<kForm>& memory, Sums* sums,
                  Fetch& fetch_values, Fetch& fetch_next) {
  ScoreAll<kForm>(part.keys, job, queries, wide, c->count, part.first / kKeyTile, part.last / kKeyTile, memory.scores,
                  fetch_values);
  if (!prepared) {
    ReadValueScales(job, values, begin, end, memory);
  }
  for (int w = 0; w < wide; ++w) {
    Softmax<kForm>(job, c[w], part, memory.scores + w * kSplit * kCols, memory.probabilities, sums[w], fetch_values);
#ifdef PENSTOCK_HAS_TILES
    if constexpr (kForm == Form::kTiles) {
      Turn(reinterpret_cast<uint32_t*>(memory.probabilities), part.first, part.last,
           memory.turned + w * kSplit / 2 * kCols);
    }
#endif
  }
  if (!prepared) {
    PrepareValues<kForm>(job, values, begin, end, memory, fetch_next);
  }
  prepared = true;
  // The values of keys outside the range must not be multiplied. In pairs of bf16 they are 0.
  constexpr bool kTiles = kForm == Form::kTiles;
  const int from = kTiles ? part.first : part.from, to = kTiles ? part.last : part.to;
  SumAll<kForm>(values, job, wide, c->count, from, to, memory, sums, fetch_next);
}

template <Form kForm>
void RunUnit(const AttentionJob& job, const AttentionUnit& unit, const AttentionUnit& next, char* scratch) {
  const AttentionTask& task = *unit.task;
  const int64_t value_dim = job.value_dim;
  const int64_t columns = task.column_end - task.column_begin, tiles = (columns + kCols - 1) / kCols;
  Carver carver(scratch);
  Memory<kForm> memory(job, tiles, carver);
  memory.Link(tiles, value_dim);
  Sums* split_sums = memory.sums + tiles;
  // Each query sees itself, so an only split is not empty.
  const bool is_only_split = !task.partial && task.split_end - task.split_begin == 1;
  // Loads the queries of tile t, and prefetches those of the next one, which are far apart in memory.
  const auto load = [&](int64_t t) {
    const int first = task.column_begin + static_cast<int>(t * kCols);
    LoadColumns<kForm>(job, task, unit.kv_head, first, memory.columns[t], memory.spread,
                       memory.queries + t * memory.query_words * kCols);
    if (!task.partial && !is_only_split) {
      Clear(memory.sums[t], value_dim);
    }
    if (t + 1 < tiles) {
      FetchQueries(job, task, unit.kv_head, first + kCols);
    } else if (next.task) {
      FetchQueries(job, *next.task, next.kv_head, next.task->column_begin);
    }
  };
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
    // While the first columns use the keys, the values of these keys are prefetched; afterwards the next keys are.
    // attention_lanes.h asks for whole tiles. The other forms call Fetch for each tile of keys: where it is scored, and
    // twice in Softmax. From an int8 cache they read the values' scales before that, so all is prefetched earlier:
    // where a tile is converted, and where it is scored.
    const int64_t tile_bytes = kKeyTile * job.cache_row_bytes(), steps = (end - begin + kKeyTile - 1) / kKeyTile;
    const int value_steps = job.int8 ? 2 : 3;
    Fetch fetch_values(raw_values, tile_bytes, value_steps * steps), fetch_next(ahead, tile_bytes, 2 * steps);
    const bool key_scales = job.int8 && kForm != Form::kInPlace;
    if (key_scales) {
      ReadAllScales(job, keys, begin, end, memory.key_scales);
    }
    if constexpr (kForm != Form::kInPlace) {
      PrepareKeys<kForm>(job, keys, begin, end, memory, fetch_values);
    }
    bool prepared = false;
    for (int64_t t = 0; t < tiles; t += kWide<kForm>) {
      const int wide = Min(kWide<kForm>, static_cast<int>(tiles - t));
      int oldest = INT32_MAX, newest = -1;
      for (int w = 0; w < wide; ++w) {
        if (split == task.split_begin) {
          load(t + w);
        }
        oldest = Min(oldest, memory.columns[t + w].min_oldest);
        newest = Max(newest, memory.columns[t + w].max_newest);
      }
      const int from = Max(oldest - start, begin), to = Min(newest + 1 - start, end);
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
                        key_scales ? memory.key_scales : nullptr,
                        job.int8 ? memory.value_scales : nullptr};
        const float* queries = memory.queries + t * memory.query_words * kCols;
        const Columns* c = memory.columns + t;
        if constexpr (kForm == Form::kInPlace) {
          auto* attend = job.int8 ? AttendInPlace<int8_t> : AttendInPlace<uint16_t>;
          attend(job, *c, queries, part, memory, split_sums[0], fetch_values, fetch_next);
        } else {
          AttendCopies<kForm>(job, c, queries, part, wide, values, begin, end, prepared, memory, split_sums,
                              fetch_values, fetch_next);
        }
      }
      for (int w = 0; w < wide; ++w) {
        const Columns& c = memory.columns[t + w];
        if (task.partial) {
          StorePartials(job, c, split_sums[w], empty, split, unit.kv_head);
        } else if (is_only_split) {
          WriteColumns(job, c, split_sums[w]);  // while the next tile is computed, memory takes it
        } else if (!empty) {
          Merge(memory.sums[t + w], split_sums[w], c.count, value_dim);
        }
      }
    }
  }
  if (!task.partial) {
    for (int64_t t = 0; t < tiles && !is_only_split; ++t) {
      WriteColumns(job, memory.columns[t], memory.sums[t]);
    }
    return;
  }
  for (int i = 0; i < task.count; ++i) {
    const int32_t token = job.members[task.first + i];
    const int begin = Max(task.split_begin, job.oldest[token] / kSplit);
    const int end = Min(task.split_end, job.newest[token] / kSplit + 1);
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

inline void DoNothing() {}

// scratch_bytes and run of a kernel without tiles.
inline int64_t VectorBytes(const AttentionJob& job, int64_t tiles) {
  return job.bf16 ? ScratchBytes<Form::kInPlace>(job, tiles) : ScratchBytes<Form::kFloat>(job, tiles);
}

inline void VectorRun(const AttentionJob& job, const AttentionUnit& unit, const AttentionUnit& next, char* scratch) {
  if (job.bf16) {
    RunUnit<Form::kInPlace>(job, unit, next, scratch);
  } else {
    RunUnit<Form::kFloat>(job, unit, next, scratch);
  }
}

}  // namespace
}  // namespace penstock
