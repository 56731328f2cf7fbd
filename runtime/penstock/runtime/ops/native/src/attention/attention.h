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

constexpr int kCols = 16;     // query columns of a tile: (token, query head of the group) pairs of one KV head
constexpr int kKeyTile = 16;  // keys handled together; page sizes are multiples of it
constexpr int kSplit = 256;   // key positions per split
constexpr int kSplitTiles = kSplit / kKeyTile;
constexpr int kMaxTiles = 8;  // column tiles of a task

// Some query tokens with their page table, and the splits they attend to together.
struct AttentionTask {
  int32_t row;           // whose page table
  int32_t first, count;  // range of AttentionJob::members
  int32_t split_begin, split_end;
  int32_t partial;  // 1: splits go to AttentionJob::partials one by one; 0: merged here and written out
};

struct AttentionJob {
  const char* q;   // [tokens, heads, dim]
  const char* kv;  // [page, 2, kv_heads, page_size, dim]
  char* out;       // as q
  bool bf16;       // of q, kv and out; else float32
  int64_t heads, kv_heads, dim, page_size;
  const int32_t* page_table;  // [rows, table_width]
  int64_t table_width;
  const float* sinks;    // [heads] or null
  float scale, softcap;  // softcap 0: none

  const int32_t* members;         // tokens, listed by task
  const int32_t* positions;       // [tokens]
  const int32_t* oldest;          // [tokens] first position each token sees
  const int32_t* first_slot;      // [tokens] index of the token's first split in partials
  float* partials;                // [slot][kv_heads][peak[G], total[G], values[G][dim]], peaks in powers of two
  std::atomic<int32_t>* pending;  // [tokens, kv_heads] splits not yet in partials

  int64_t group() const { return heads / kv_heads; }
  int64_t element() const { return bf16 ? 2 : 4; }
  int64_t partial_floats() const { return group() * (dim + 2); }
  float* partial(int64_t token, int64_t split, int64_t kv_head) const {
    const int64_t slot = first_slot[token] + split - oldest[token] / kSplit;
    return partials + (slot * kv_heads + kv_head) * partial_floats();
  }
  // First key (value = 0) or value (value = 1) of the tile of keys that starts at `position`.
  const char* tile(const AttentionTask& task, int64_t kv_head, int64_t position, int value) const {
    const int64_t page = page_table[task.row * table_width + position / page_size];
    return kv + ((((page * 2 + value) * kv_heads + kv_head) * page_size) + position % page_size) * dim * element();
  }
};

// A unit of work is a task for one KV head.
struct AttentionUnit {
  const AttentionTask* task;  // null: none
  int64_t kv_head;
};

struct AttentionKernel {
  void (*enter)();  // on a thread, before its units
  void (*leave)();
  int64_t (*scratch_bytes)(const AttentionJob&, int64_t tiles);
  // `next` is what this thread will do afterwards: its first keys are prefetched.
  void (*run)(const AttentionJob&, const AttentionUnit& unit, const AttentionUnit& next, char* scratch);
};

const AttentionKernel& AttentionAvx2();
const AttentionKernel& AttentionAvx512();
const AttentionKernel& AttentionAvx512Bf16();
const AttentionKernel& AttentionAmx();

}  // namespace penstock
