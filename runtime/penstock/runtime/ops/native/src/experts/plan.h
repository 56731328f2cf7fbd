// Which rows go to which expert.
#pragma once

#include <cstdint>
#include <vector>

namespace penstock {

// The id of a choice for which nothing is computed.
constexpr int32_t kNoExpert = -1;

// The choices of some rows: each row chooses k experts, with a weight for each.
struct Choices {
  // The choices of one expert, which stand together: [begin, begin + count).
  struct Expert {
    int64_t number, begin, count;
  };

  std::vector<Expert> experts;  // those that were chosen, in ascending order
  std::vector<int32_t> rows;    // of each choice, ascending for each expert
  std::vector<float> weights;   // of each choice
  std::vector<int64_t> places;  // [row][k]: where the choice of a row stands; -1 for one of kNoExpert
};

// Sorts the choices of rows [first, last) by expert. ids and weights are [any, per_row], and choices' rows are counted
// from the first row of these. Throws std::out_of_range if an id is neither kNoExpert nor in [0, num_experts).
Choices SortChoices(const int32_t* ids, const float* weights, int64_t first, int64_t last, int64_t per_row,
                    int64_t num_experts);

}  // namespace penstock
