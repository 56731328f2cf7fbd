#include "experts/plan.h"

#include <stdexcept>

namespace penstock {

Choices SortChoices(const int32_t* ids, const float* weights, int64_t first, int64_t last, int64_t per_row,
                    int64_t num_experts) {
  const int64_t begin = first * per_row, end = last * per_row;
  std::vector<int64_t> next(num_experts);  // the number of each expert's choices, then the place of its next one
  for (int64_t c = begin; c < end; ++c) {
    if (ids[c] == kNoExpert) {
      continue;
    }
    if (ids[c] < 0 || ids[c] >= num_experts) {
      throw std::out_of_range("a row chooses an expert that does not exist");
    }
    ++next[ids[c]];
  }
  Choices choices;
  int64_t place = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t count = next[e];
    if (count) {
      choices.experts.push_back({e, place, count});
    }
    next[e] = place;
    place += count;
  }
  choices.rows.resize(place);
  choices.weights.resize(place);
  choices.places.assign(end - begin, -1);
  for (int64_t c = begin; c < end; ++c) {
    if (ids[c] == kNoExpert) {
      continue;
    }
    const int64_t at = next[ids[c]]++;
    choices.rows[at] = static_cast<int32_t>(c / per_row);
    choices.weights[at] = weights[c];
    choices.places[c - begin] = at;
  }
  return choices;
}

}  // namespace penstock
