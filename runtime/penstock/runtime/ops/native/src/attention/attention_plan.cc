#include "attention/attention_plan.h"

#include <algorithm>
#include <cstring>

namespace penstock {

std::string AttentionPlan::Make(const AttentionRows& rows, int64_t group, int64_t kv_heads, int64_t threads) {
  num_tokens = num_slots = 0;
  positions.clear(), oldest.clear(), newest.clear(), token_rows.clear(), first_slot.clear();
  members.clear(), tasks.clear(), order.clear();
  shared.assign(rows.num_rows, 0);
  int64_t wide_rows = 0;
  for (int64_t r = 0; r < rows.num_rows; ++r) {
    const int64_t start = rows.starts[r], count = rows.q_lens[r];
    if (count == 0) {
      continue;
    }
    const int64_t pages = (start + count + rows.page_size - 1) / rows.page_size;
    if (start < 0 || count < 0 || pages > rows.table_width || num_tokens + count > rows.num_tokens) {
      return "row " + std::to_string(r) + " has " + std::to_string(count) + " tokens at " + std::to_string(start) +
             ", more than its page table or the step holds";
    }
    const bool small = count * group <= kCols;
    wide_rows += count == 1 && !small;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t position = start + i;
      int64_t first = rows.window > 0 ? std::max<int64_t>(0, position - rows.window + 1) : 0;
      if (rows.chunk > 0) {
        first = std::max(first, position - position % rows.chunk);
      }
      const int64_t last = rows.reach ? rows.reach[num_tokens + i] : position;
      if (last < position || last >= start + count || (i > 0 && last < newest.back())) {
        return "row " + std::to_string(r) + " ends at " + std::to_string(start + count - 1) + ", and its token at " +
               std::to_string(position) + " looks ahead to " + std::to_string(last);
      }
      positions.push_back(static_cast<int32_t>(position));
      oldest.push_back(static_cast<int32_t>(first));
      newest.push_back(static_cast<int32_t>(last));
      token_rows.push_back(static_cast<int32_t>(r));
      first_slot.push_back(static_cast<int32_t>(num_slots));
      if (small) {
        num_slots += last / kSplit - first / kSplit + 1;
      }
    }
    const int64_t seen = oldest[num_tokens];
    for (int64_t page = seen / rows.page_size; page < pages; ++page) {
      const int32_t id = rows.page_table[r * rows.table_width + page];
      if (id < 0 || id >= rows.num_pages) {
        return "row " + std::to_string(r) + " reads page " + std::to_string(id) + " of " +
               std::to_string(rows.num_pages);
      }
    }
    num_tokens += count;
  }
  if (num_slots > INT32_MAX) {
    return "the rows are too long to be read in one step";
  }
  ShareSplits(rows, group);
  // A token with several tiles of columns has few, large sums for each split, so where there are not enough such tokens
  // for all threads, its columns are divided rather than its splits.
  const int64_t tiles = (group + kCols - 1) / kCols, wanted = threads * 4;
  const int64_t parts = std::clamp<int64_t>(wanted / std::max<int64_t>(1, wide_rows * kv_heads), 1, tiles);
  const int wide_columns = static_cast<int>((tiles + parts - 1) / parts * kCols);
  for (int64_t t = 0; t < num_tokens;) {
    const int32_t row = token_rows[t];
    AddRow(rows, row, static_cast<int32_t>(t), shared[row], group, wide_columns);
    t += rows.q_lens[row];
  }
  // Prefill comes first, then the longest of the rest, so that no thread has much left at the end.
  const auto is_long = [&](const AttentionTask& task) {
    return rows.q_lens[task.row] > 1 && task.count * group > kCols && !task.partial;
  };
  const auto rest = std::stable_partition(tasks.begin(), tasks.end(), is_long);
  num_long = rest - tasks.begin();
  std::stable_sort(rest, tasks.end(), [](const AttentionTask& a, const AttentionTask& b) {
    const auto work = [](const AttentionTask& task) {
      return (task.column_end - task.column_begin) * (task.split_end - task.split_begin);
    };
    return work(a) > work(b);
  });
  return "";
}

void AttentionPlan::AddTask(int32_t row, int begin, int end, bool partial, int64_t columns) {
  // The caller has appended the members; several tasks of the same tokens refer to the same members.
  AttentionTask task{};
  task.row = row;
  task.split_begin = begin;
  task.split_end = end;
  task.partial = partial;
  task.column_end = static_cast<int32_t>(columns);
  tasks.push_back(task);
}

void AttentionPlan::AddRow(const AttentionRows& rows, int32_t row, int32_t first_token, int from_split, int64_t group,
                           int wide_columns) {
  const int32_t count = rows.q_lens[row];
  const bool small = count * group <= kCols;
  const int32_t block = small ? count : static_cast<int32_t>(std::max<int64_t>(1, kMaxTiles * kCols / group));
  for (int32_t i = 0; i < count; i += block) {
    const int32_t tokens = std::min(block, count - i), first = first_token + i;
    const int32_t at = static_cast<int32_t>(members.size());
    for (int32_t t = 0; t < tokens; ++t) {
      members.push_back(first + t);
    }
    const int begin = std::max(oldest[first] / kSplit, from_split), end = newest[first + tokens - 1] / kSplit + 1;
    const bool partial = small && (from_split > 0 || end - begin > 1);
    const int step = partial ? 1 : end - begin;  // all heads of a split lie close together, see attention.cc
    const int columns = static_cast<int>(tokens * group), part = count == 1 && !small ? wide_columns : columns;
    for (int split = begin; split < end; split += step) {
      for (int column = 0; column < columns; column += part) {
        AddTask(row, split, std::min(split + step, end), partial, std::min(column + part, columns));
        tasks.back().first = at;
        tasks.back().count = tokens;
        tasks.back().column_begin = column;
      }
    }
  }
}

// Finds decode rows whose page tables begin with the same pages, and gives the splits that lie wholly in these pages to
// tasks that the rows share. Rows that no longer see position 0, because of a window, share nothing.
void AttentionPlan::ShareSplits(const AttentionRows& rows, int64_t group) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (rows.q_lens[token_rows[t]] == 1 && oldest[t] == 0 && positions[t] + 1 >= kSplit && group <= kCols) {
      order.push_back(static_cast<int32_t>(t));
    }
  }
  if (order.size() < 2) {
    return;
  }
  const auto table = [&](int32_t t) { return rows.page_table + token_rows[t] * rows.table_width; };
  const auto whole_pages = [&](int32_t t) { return (positions[t] + 1) / rows.page_size; };
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return std::lexicographical_compare(table(a), table(a) + whole_pages(a), table(b), table(b) + whole_pages(b));
  });
  std::vector<int32_t> common(order.size(), 0);  // how many splits i shares with i + 1
  for (size_t i = 0; i + 1 < order.size(); ++i) {
    const int32_t a = order[i], b = order[i + 1];
    const int64_t most = std::min(whole_pages(a), whole_pages(b));
    const int64_t pages = std::mismatch(table(a), table(a) + most, table(b)).first - table(a);
    common[i] = static_cast<int32_t>(pages * rows.page_size / kSplit);
  }
  ShareRun(0, static_cast<int>(order.size()), 0, group, common);
}

// Rows order[begin .. end) share the splits before `split`.
void AttentionPlan::ShareRun(int begin, int end, int split, int64_t group, const std::vector<int32_t>& common) {
  if (end - begin < 2) {
    shared[token_rows[order[begin]]] = split;
    return;
  }
  const int until = *std::min_element(common.begin() + begin, common.begin() + end - 1);
  if (until > split) {
    const int block = static_cast<int>(kMaxTiles * kCols / group);
    for (int i = begin; i < end; i += block) {
      const int count = std::min(block, end - i);
      const int32_t at = static_cast<int32_t>(members.size());
      members.insert(members.end(), order.begin() + i, order.begin() + i + count);
      for (int s = split; s < until; ++s) {
        AddTask(token_rows[order[i]], s, s + 1, true, count * group);
        tasks.back().first = at;
        tasks.back().count = count;
      }
    }
  }
  for (int i = begin; i < end;) {
    int stop = i + 1;
    while (stop < end && common[stop - 1] > until) {
      ++stop;
    }
    ShareRun(i, stop, std::max(split, until), group, common);
    i = stop;
  }
}

namespace {

constexpr int64_t kHead = 6;  // numbers before the arrays
constexpr int64_t kTask = sizeof(AttentionTask) / sizeof(int32_t);

}  // namespace

int64_t AttentionPlan::Size() const {
  return kHead + 5 * num_tokens + static_cast<int64_t>(members.size() + kTask * tasks.size());
}

void AttentionPlan::Write(int32_t* to) const {
  int32_t most_tokens = 1;
  for (const AttentionTask& task : tasks) {
    most_tokens = std::max(most_tokens, task.count);
  }
  for (const int64_t number : {num_tokens, num_slots, static_cast<int64_t>(members.size()),
                               static_cast<int64_t>(tasks.size()), num_long, static_cast<int64_t>(most_tokens)}) {
    *to++ = static_cast<int32_t>(number);
  }
  for (const std::vector<int32_t>* values : {&positions, &oldest, &newest, &token_rows, &first_slot, &members}) {
    to = std::copy(values->begin(), values->end(), to);
  }
  if (!tasks.empty()) {
    memcpy(to, tasks.data(), tasks.size() * sizeof(AttentionTask));
  }
}

PlanView::PlanView(const int32_t* from)
    : num_tokens(from[0]), num_slots(from[1]), num_tasks(from[3]), num_long(from[4]), most_tokens(from[5]) {
  positions = from + kHead;
  oldest = positions + num_tokens;
  newest = oldest + num_tokens;
  token_rows = newest + num_tokens;
  first_slot = token_rows + num_tokens;
  members = first_slot + num_tokens;
  tasks = reinterpret_cast<const AttentionTask*>(members + from[2]);
}

}  // namespace penstock
