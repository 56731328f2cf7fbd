// The gated norm of state.h, for the instruction set of the including file.
#pragma once

#include <cmath>

#include "state/state.h"
#include "state/values.h"

namespace penstock {
namespace {

// One run of channels.
template <typename Value>
void GateRun(const GatedNormJob& job, float* y, const Value* gate, const float* norm, Value* out) {
  Vec::F squares = Vec::Set(0.0f);
  for (int64_t c = 0; c < job.size; c += Vec::kWidth) {
    Vec::F value = Vec::Load(y + c);
    if (job.gate_first) {
      value = Vec::Mul(value, Silu(LoadValues(gate + c)));
      Vec::Store(y + c, value);
    }
    squares = Vec::Fma(value, value, squares);
  }
  const Vec::F inverse = Vec::Set(1.0f / std::sqrt(Total(squares) / static_cast<float>(job.size) + job.eps));
  for (int64_t c = 0; c < job.size; c += Vec::kWidth) {
    const Vec::F value = Vec::Mul(Vec::Mul(Vec::Load(y + c), inverse), Vec::Load(norm + c));
    StoreValues(out + c, job.gate_first ? value : Vec::Mul(value, Silu(LoadValues(gate + c))));
  }
}

template <typename Value>
void GateTokens(const GatedNormJob& job, int64_t begin, int64_t end) {
  const auto* gate = reinterpret_cast<const Value*>(job.gate);
  auto* out = reinterpret_cast<Value*>(job.out);
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t run = 0; run < job.channels; run += job.size) {
      const int64_t at = token * job.channels + run;
      GateRun(job, job.y + at, gate + at, job.norm + (job.shared_norm ? 0 : run), out + at);
    }
  }
}

inline void GatedNorm(const GatedNormJob& job, int64_t begin, int64_t end) {
  const TinyIsZero tiny_is_zero;
  if (job.bf16) {
    GateTokens<uint16_t>(job, begin, end);
  } else {
    GateTokens<float>(job, begin, end);
  }
}

}  // namespace
}  // namespace penstock
