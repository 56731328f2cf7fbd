#include "state/rows.h"

namespace penstock {

std::string MakeRows(const RowOperands& operands, std::vector<StateRow>& rows) {
  const auto entry = [&](int32_t number) -> int64_t {
    return number >= 0 && number < operands.num_entries ? number : -1;
  };
  rows.clear();
  int64_t first = 0;
  for (int64_t r = 0; r < operands.num_rows; ++r) {
    const int64_t count = operands.q_lens[r];
    if (count < 0 || first + count > operands.num_tokens) {
      return "row " + std::to_string(r) + " has " + std::to_string(count) + " tokens, in a step of " +
             std::to_string(operands.num_tokens);
    }
    if (count == 0) {
      continue;
    }
    StateRow row{first, count, entry(operands.from[r]), entry(operands.to[r]), 0, -1};
    if (operands.cut && operands.cut[r] != 0 && entry(operands.cut_to[r]) >= 0) {
      row.cut = operands.cut[r];
      row.cut_to = entry(operands.cut_to[r]);
      if (row.cut < 0 || row.cut > count) {
        return "the state of row " + std::to_string(r) + ", of " + std::to_string(count) +
               " tokens, is to be kept after " + std::to_string(row.cut);
      }
    }
    rows.push_back(row);
    first += count;
  }
  return "";
}

}  // namespace penstock
