// The tasks of which a step's paged attention consists. One plan serves all layers with as many heads and the same
// window.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention/attention.h"

namespace penstock {

// The host's description of a step: row r has q_lens[r] tokens, the first of them at position starts[r].
struct AttentionRows {
  const int32_t* starts;
  const int32_t* q_lens;
  const int32_t* page_table;  // [num_rows, table_width]
  const int32_t* reach;       // [num_tokens] the last position that each token sees, or null: its own
  int64_t num_rows, table_width;
  int64_t num_pages, page_size;
  int64_t num_tokens;  // length of the arrays; there may be fewer real tokens
  int window, chunk;   // 0: none
};

// A plan in the making. The calling thread keeps it between calls, so that its vectors keep their memory.
struct AttentionPlan {
  int64_t num_tokens;                                                      // real tokens
  std::vector<int32_t> positions, oldest, newest, token_rows, first_slot;  // one for each token
  int64_t num_slots;
  std::vector<int32_t> members;
  std::vector<AttentionTask> tasks;    // the tasks of long rows first, row by row
  int64_t num_long;                    // how many tasks are of long rows
  std::vector<int32_t> shared, order;  // scratch: one for each row; decode rows, sorted by page table

  // Fills the plan. Returns "", or which row does not agree with the cache.
  std::string Make(const AttentionRows& rows, int64_t group, int64_t kv_heads, int64_t threads);

  // How many numbers Write writes.
  int64_t Size() const;

  // Writes the plan in the form that PlanView reads.
  void Write(int32_t* to) const;

 private:
  void AddRow(const AttentionRows& rows, int32_t row, int32_t first_token, int from_split, int64_t group,
              int wide_columns);
  void AddTask(int32_t row, int begin, int end, bool partial, int64_t columns);
  void ShareSplits(const AttentionRows& rows, int64_t group);
  void ShareRun(int begin, int end, int split, int64_t group, const std::vector<int32_t>& common);
};

// A view of a plan that Write has written.
struct PlanView {
  explicit PlanView(const int32_t* from);

  int64_t num_tokens, num_slots, num_tasks, num_long;
  int64_t most_tokens;  // the most tokens that a task has
  const int32_t *positions, *oldest, *newest, *token_rows, *first_slot, *members;
  const AttentionTask* tasks;
};

}  // namespace penstock
