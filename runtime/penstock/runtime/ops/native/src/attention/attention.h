// Paged attention: what the planner (attention.cc) and the kernels of each instruction set share.
//
// The key range of every query is cut into splits, at absolute multiples of kSplit positions. The attention of a split
// (peak, total, weighted values) is computed independently of the others, and a query's splits are merged in ascending
// order, whichever threads computed them. So a query's bits do not depend on which rows share the batch, how work was
// divided, or whether shared pages were read once for several rows.
#pragma once

#include <atomic>
#include <cstdint>

namespace penstock {

constexpr int kCols = 16;     // query columns of a tile: pairs (token, query head of the group) of one KV head
constexpr int kKeyTile = 16;  // keys that are handled together; page sizes are multiples of it
constexpr int kSplit = 256;   // key positions per split
constexpr int kSplitTiles = kSplit / kKeyTile;
constexpr int64_t kMostDims = 576;  // channels of a key that is spread; attention.py allows no more
constexpr int kMaxTiles = 8;        // the most column tiles of a task with several tokens

// Some query tokens with their page table, and the splits they attend to together.
struct AttentionTask {
  int32_t row;           // the row whose page table the tokens use
  int32_t first, count;  // range of AttentionJob::members
  int32_t split_begin, split_end;
  int32_t column_begin, column_end;  // which pairs (token, query head of the group) it computes; usually all
  int32_t partial;  // 1: each split goes to AttentionJob::partials; 0: the task merges its splits and writes the output
};

struct AttentionJob {
  const char* q;   // [tokens, heads, dim]
  const char* kv;  // [page, 2, kv_heads, page_size, a row of dim numbers]; if keys_only, [page, 1, ...]
  char* out;       // [tokens, heads, value_dim]
  bool bf16;       // q, out and the new keys and values are bf16, else float32
  bool int8;       // a row of kv is dim int8 values and their scale, a float32; else kv is like q
  bool keys_only;  // a value is the first value_dim numbers of its key; else value_dim is dim
  int64_t heads, kv_heads, dim, value_dim, page_size;
  const int32_t* page_table;  // [rows, table_width]
  int64_t table_width;
  const float* sinks;    // [heads] or null
  const float* slopes;   // [heads] or null: a score is lowered by this for each position between key and query
  float scale, softcap;  // softcap 0: none

  const int32_t* members;         // tokens in the order of tasks
  const int32_t* positions;       // [tokens]
  const int32_t* oldest;          // [tokens] the first position that each token sees
  const int32_t* newest;          // [tokens] the last one: its own, or one ahead within the step
  const int32_t* first_slot;      // [tokens] index of the token's first split in partials
  float* partials;                // [slot][kv_heads][peak[G], total[G], values[G][value_dim]], peaks in powers of two
  std::atomic<int32_t>* pending;  // [tokens, kv_heads] how many splits are not in partials yet

  int64_t group() const { return heads / kv_heads; }
  int64_t element() const { return bf16 ? 2 : 4; }
  int64_t input_row_bytes() const { return dim * element(); }                   // of a query, and of a new key or value
  int64_t cache_row_bytes() const { return int8 ? dim + 4 : dim * element(); }  // of a key or value in the cache
  bool spreads() const { return int8 && !keys_only; }  // whether keys are spread (attention_spread.h)
  int64_t planes() const { return keys_only ? 1 : 2; }
  int64_t partial_floats() const { return group() * (value_dim + 2); }
  float* partial(int64_t token, int64_t split, int64_t kv_head) const {
    const int64_t slot = first_slot[token] + split - oldest[token] / kSplit;
    return partials + (slot * kv_heads + kv_head) * partial_floats();
  }
  // The first key (value = 0) or value (value = 1) of the tile of keys that starts at `position`.
  const char* tile(const AttentionTask& task, int64_t kv_head, int64_t position, int value) const {
    const int64_t page = page_table[task.row * table_width + position / page_size];
    const int64_t plane = keys_only ? page : page * 2 + value;
    return kv + (((plane * kv_heads + kv_head) * page_size) + position % page_size) * cache_row_bytes();
  }
};

// A unit of work is a task for one KV head.
struct AttentionUnit {
  const AttentionTask* task;  // null: there is no unit
  int64_t kv_head;
};

struct AttentionKernel {
  void (*enter)();  // called on a thread before its units
  void (*leave)();
  // Writes a new key (value = 0) or value (value = 1) to its row of an int8 cache.
  void (*quantize)(const AttentionJob&, const char* from, int value, char* to);
  int64_t (*scratch_bytes)(const AttentionJob&, int64_t tiles);
  // `next` is the unit that this thread computes afterwards: its first keys are prefetched.
  void (*run)(const AttentionJob&, const AttentionUnit& unit, const AttentionUnit& next, char* scratch);
};

const AttentionKernel& AttentionAvx2();
const AttentionKernel& AttentionAvx512();
const AttentionKernel& AttentionAvx512Bf16();
const AttentionKernel& AttentionAmx();

}  // namespace penstock
