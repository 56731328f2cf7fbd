// Which tasks a step's paged attention consists of. One plan serves all layers with as many heads and the same window.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention/attention.h"

namespace penstock {

// What the host knows of a step: row r has q_lens[r] tokens, the first at position starts[r].
struct AttentionRows {
  const int32_t* starts;
  const int32_t* q_lens;
  const int32_t* page_table;  // [num_rows, table_width]
  int64_t num_rows, table_width;
  int64_t num_pages, page_size;
  int64_t num_tokens;  // of the arrays; real tokens may be fewer
  int window, chunk;   // 0: none
};

// Kept by the calling thread between calls, so that its vectors keep their memory.
struct AttentionPlan {
  int64_t num_tokens;                                              // real ones
  std::vector<int32_t> positions, oldest, token_rows, first_slot;  // by token
  int64_t num_slots;
  std::vector<int32_t> members;
  std::vector<AttentionTask> tasks;    // first those of long rows, row by row
  int64_t num_long;                    // of these
  std::vector<int32_t> shared, order;  // scratch: by row, decode rows sorted by page table

  // Fills the plan. An answer that is not empty says which row is not consistent with the cache.
  std::string Make(const AttentionRows& rows, int64_t group, int64_t kv_heads, int64_t threads);

  // Numbers that Write takes.
  int64_t Size() const;

  // As PlanView reads it.
  void Write(int32_t* to) const;

 private:
  void AddRow(const AttentionRows& rows, int32_t row, int32_t first_token, int from_split, int64_t group,
              int splits_per_task);
  void AddTask(int32_t row, int begin, int end, bool partial);
  void ShareSplits(const AttentionRows& rows, int64_t group);
  void ShareRun(int begin, int end, int split, int64_t group, const std::vector<int32_t>& common);
};

// A plan where Write put it.
struct PlanView {
  explicit PlanView(const int32_t* from);

  int64_t num_tokens, num_slots, num_tasks, num_long;
  int64_t most_tokens;  // of a task
  const int32_t *positions, *oldest, *token_rows, *first_slot, *members;
  const AttentionTask* tasks;
};

}  // namespace penstock
