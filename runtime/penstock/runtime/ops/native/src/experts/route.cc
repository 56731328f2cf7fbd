// The FFI operation `penstock_route`: which experts each row goes to, and with what weights.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/buffers.h"
#include "common/common.h"
#include "common/guarded.h"
#include "common/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace penstock {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kLogitsAtOnce = 4096;  // in a call of the loop over rows: some ten microseconds

// What makes scores of logits. The numbers are those of experts.py.
enum class Score : int { kSoftmax = 0, kSigmoid = 1, kSparseMixer = 2 };

struct RouteJob {
  int64_t num_experts, per_row, num_groups, top_groups;
  int64_t in_group;  // how many of a group's highest keys make its own: 1 or 2
  Score score;
  float jitter;  // of kSparseMixer
  bool normalize;
  float scale;
  const float* correction;    // [num_experts] or null
  const float* expert_scale;  // [num_experts] or null
};

// The best of the values that it is shown, in descending order. NaN is the largest, and of equal values the first one
// shown is the better.
class Best {
 public:
  explicit Best(int64_t most) : most_(most) { found_.reserve(most + 1); }

  void Clear() { found_.clear(); }

  void Show(float value, int32_t id) {
    if (static_cast<int64_t>(found_.size()) == most_ && !Above(value, found_.back().value)) {
      return;
    }
    auto at = found_.end();
    while (at != found_.begin() && Above(value, std::prev(at)->value)) {
      --at;
    }
    found_.insert(at, {value, id});
    if (static_cast<int64_t>(found_.size()) > most_) {
      found_.pop_back();
    }
  }

  int64_t size() const { return static_cast<int64_t>(found_.size()); }
  int32_t id(int64_t i) const { return found_[i].id; }
  float value(int64_t i) const { return found_[i].value; }

 private:
  struct Found {
    float value;
    int32_t id;
  };

  static bool Above(float a, float b) { return std::isnan(a) ? !std::isnan(b) : a > b; }

  int64_t most_;
  std::vector<Found> found_;
};

// Routes one row after the other. The results for a row depend on its own logits alone.
class Router {
 public:
  explicit Router(const RouteJob& job)
      : job_(job),
        scores_(job.num_experts),
        keys_(job.num_experts),
        in_group_(job.in_group),
        groups_(job.top_groups),
        experts_(job.per_row) {}

  void Row(const float* logits, int32_t* ids, float* weights) {
    if (job_.score == Score::kSparseMixer) {
      Mix(logits, ids, weights);
      return;
    }
    MakeScores(logits);
    Choose();
    float total = 0.0f;
    for (int64_t i = 0; i < job_.per_row; ++i) {
      ids[i] = experts_.id(i);
      weights[i] = scores_[ids[i]];
      total += weights[i];
    }
    for (int64_t i = 0; i < job_.per_row; ++i) {
      const float share = job_.normalize ? weights[i] / (total + 1e-20f) : weights[i];
      weights[i] = share * job_.scale * (job_.expert_scale ? job_.expert_scale[ids[i]] : 1.0f);
    }
  }

 private:
  // Sets each expert's score, which makes its weight, and its key, by which experts are chosen. Where nothing is added
  // to the scores, the keys are the logits: they have the same order, and no two of them become equal by rounding.
  void MakeScores(const float* logits) {
    const bool softmax = job_.score == Score::kSoftmax;
    float peak = -std::numeric_limits<float>::infinity(), total = 0.0f;
    for (int64_t e = 0; e < job_.num_experts; ++e) {
      peak = logits[e] > peak ? logits[e] : peak;
    }
    for (int64_t e = 0; e < job_.num_experts; ++e) {
      scores_[e] = softmax ? std::exp(logits[e] - peak) : 1.0f / (1.0f + std::exp(-logits[e]));
      total += scores_[e];
    }
    for (int64_t e = 0; e < job_.num_experts; ++e) {
      scores_[e] = softmax ? scores_[e] / total : scores_[e];
      const bool plain = !job_.correction && job_.num_groups == 1;
      keys_[e] = plain ? logits[e] : scores_[e] + (job_.correction ? job_.correction[e] : 0.0f);
    }
  }

  void Choose() {
    const int64_t size = job_.num_experts / job_.num_groups;
    groups_.Clear();
    for (int64_t g = 0; g < job_.num_groups; ++g) {
      in_group_.Clear();
      for (int64_t e = g * size; e < (g + 1) * size; ++e) {
        in_group_.Show(keys_[e], static_cast<int32_t>(e));
      }
      const float second = in_group_.size() > 1 ? in_group_.value(1) : 0.0f;
      groups_.Show(in_group_.value(0) + second, static_cast<int32_t>(g));
    }
    chosen_groups_.assign(job_.num_groups, false);
    for (int64_t i = 0; i < groups_.size(); ++i) {
      chosen_groups_[groups_.id(i)] = true;
    }
    experts_.Clear();
    for (int64_t e = 0; e < job_.num_experts; ++e) {
      if (chosen_groups_[e / size]) {
        experts_.Show(keys_[e], static_cast<int32_t>(e));
      }
    }
  }

  // SparseMixer (Liu et al. 2024, arXiv 2409.12136): the choices are the highest logits, one after the other. Each
  // weight is the softmax over those that are not chosen yet and not far below the choice.
  void Mix(const float* logits, int32_t* ids, float* weights) {
    experts_.Clear();
    for (int64_t e = 0; e < job_.num_experts; ++e) {
      experts_.Show(logits[e], static_cast<int32_t>(e));
    }
    for (int64_t i = 0; i < job_.per_row; ++i) {
      const float peak = experts_.value(i);
      float total = 0.0f;
      for (int64_t e = 0; e < job_.num_experts; ++e) {
        const float below = (peak - logits[e]) / std::max(std::abs(logits[e]), peak);
        bool is_left = !(below > 2 * job_.jitter);
        for (int64_t j = 0; j < i; ++j) {
          is_left = is_left && ids[j] != e;
        }
        total += is_left ? std::exp(logits[e] - peak) : 0.0f;
      }
      ids[i] = experts_.id(i);
      weights[i] = job_.scale / total;
    }
  }

  const RouteJob& job_;
  std::vector<float> scores_, keys_;
  Best in_group_, groups_, experts_;
  std::vector<bool> chosen_groups_;
};

// logits float32 [T, E]; num_rows int32 []: rows from this one on are padding, and are not written in ids and weights,
// [T, k]. correction and expert_scale float32 [any] or [0]: the values for the experts begin at the places `at`.
ffi::Error Route(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::S32> num_rows,
                 ffi::Buffer<ffi::F32> correction, ffi::Buffer<ffi::F32> expert_scale,
                 ffi::Result<ffi::Buffer<ffi::S32>> ids, ffi::Result<ffi::Buffer<ffi::F32>> weights, int32_t score,
                 float jitter, bool normalize, float scale, int64_t num_groups, int64_t top_groups, int64_t in_group,
                 ffi::Span<const int64_t> at) {
  const int64_t num_experts = logits.dimensions()[1], per_row = ids->dimensions()[1];
  if (num_groups < 1 || num_experts % num_groups || top_groups < 1 || top_groups > num_groups || per_row < 1 ||
      in_group < 1 || in_group > 2 || per_row > num_experts / num_groups * top_groups || at.size() != 2) {
    return ffi::Error::InvalidArgument("experts, groups, choices and places do not fit together");
  }
  const RouteJob job{num_experts,
                     per_row,
                     num_groups,
                     top_groups,
                     in_group,
                     static_cast<Score>(score),
                     jitter,
                     normalize,
                     scale,
                     From<float>(correction, at[0]),
                     From<float>(expert_scale, at[1])};
  const int64_t rows = std::min<int64_t>(num_rows.typed_data()[0], logits.dimensions()[0]);
  const int64_t rows_at_once = std::max<int64_t>(1, kLogitsAtOnce / num_experts);
  ParallelFor(pool, CeilDiv(std::max<int64_t>(0, rows), rows_at_once), [&](int64_t part) {
    Router router(job);
    for (int64_t row = part * rows_at_once; row < std::min((part + 1) * rows_at_once, rows); ++row) {
      router.Row(logits.typed_data() + row * num_experts, ids->typed_data() + row * per_row,
                 weights->typed_data() + row * per_row);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace penstock

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* penstock_route(XLA_FFI_CallFrame* frame) {
  using namespace penstock;
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<ffi::Buffer<ffi::F32>>()
                             .Arg<ffi::Buffer<ffi::S32>>()
                             .Arg<ffi::Buffer<ffi::F32>>()
                             .Arg<ffi::Buffer<ffi::F32>>()
                             .Ret<ffi::Buffer<ffi::S32>>()
                             .Ret<ffi::Buffer<ffi::F32>>()
                             .Attr<int32_t>("score")
                             .Attr<float>("jitter")
                             .Attr<bool>("normalize")
                             .Attr<float>("scale")
                             .Attr<int64_t>("num_groups")
                             .Attr<int64_t>("top_groups")
                             .Attr<int64_t>("in_group")
                             .Attr<ffi::Span<const int64_t>>("at")
                             .To(Guarded<&Route>::Call)
                             .release();
  return handler->Call(frame);
}
