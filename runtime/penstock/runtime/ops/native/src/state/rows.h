// The rows of a step as layers with state see them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace penstock {

// A row of `count` > 0 tokens of the step, from token `first` on. `from`, `to` and `cut_to` are entries of the state's
// arrays, or -1: zeros are read, nothing is written.
struct StateRow {
  int64_t first, count;
  int64_t from;         // what the row goes on from
  int64_t to;           // where the state after all its tokens goes
  int64_t cut, cut_to;  // where the state after `cut` of its tokens goes too; cut is 0 if it goes nowhere
};

// The operands of a step: int32 [num_rows], and `cut` and `cut_to` may be null. Entries outside [0, num_entries) are
// those past the arrays' end.
struct RowOperands {
  const int32_t* q_lens;
  const int32_t* from;
  const int32_t* to;
  const int32_t* cut;
  const int32_t* cut_to;
  int64_t num_rows, num_tokens, num_entries;
};

// Makes the list of the rows that have tokens. Returns what is wrong with the operands, "" if nothing is.
std::string MakeRows(const RowOperands& operands, std::vector<StateRow>& rows);

// How many tokens the rows have; these come first in the step.
inline int64_t NumTokens(const std::vector<StateRow>& rows) {
  return rows.empty() ? 0 : rows.back().first + rows.back().count;
}

}  // namespace penstock
