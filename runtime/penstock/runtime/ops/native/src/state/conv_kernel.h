// The causal convolution of state.h, for the instruction set of the including file.
#pragma once

#include <cstring>

#include "state/state.h"
#include "state/values.h"

namespace penstock {
namespace {

// Of the inputs of a row, those of its tokens of this step are 0, 1, ..., and those before it are -1, -2, ...

// Input `number` < 0, in float32.
inline const float* InputBefore(const ConvJob& job, const StateRow& row, int64_t number) {
  return row.from < 0 ? job.zeros : job.state + ((row.from + 1) * (job.taps - 1) + number) * job.channels;
}

template <typename Value>
const Value* InputOf(const ConvJob& job, const StateRow& row, int64_t number) {
  return reinterpret_cast<const Value*>(job.x) + (row.first + number) * job.channels;
}

// Writes channels [low, high) of the inputs that are to be kept after `count` tokens to an entry of the state.
template <typename Value>
void KeepInputs(const ConvJob& job, const StateRow& row, int64_t count, int64_t entry, int64_t low, int64_t high) {
  const int64_t kept = job.taps - 1;
  for (int64_t i = 0; i < kept; ++i) {
    float* to = job.state + (entry * kept + i) * job.channels;
    const int64_t number = count - kept + i;
    if (number < 0) {
      memcpy(to + low, InputBefore(job, row, number) + low, (high - low) * sizeof(float));
      continue;
    }
    const Value* input = InputOf<Value>(job, row, number);
    for (int64_t c = low; c < high; c += Vec::kWidth) {
      Vec::Store(to + c, LoadValues(input + c));
    }
  }
}

template <typename Value, typename Weight>
void ConvolveToken(const ConvJob& job, const StateRow& row, int64_t token, int64_t low, int64_t high) {
  const int64_t oldest = token - job.taps + 1, before = oldest < 0 ? -oldest : 0;
  const float* kept[kMostTaps];
  const Value* inputs[kMostTaps];
  for (int64_t j = 0; j < job.taps; ++j) {
    if (j < before) {
      kept[j] = InputBefore(job, row, oldest + j);
    } else {
      inputs[j] = InputOf<Value>(job, row, oldest + j);
    }
  }
  const auto* weight = reinterpret_cast<const Weight*>(job.weight);
  const auto* bias = reinterpret_cast<const Weight*>(job.bias);
  auto* y = reinterpret_cast<Value*>(job.y) + (row.first + token) * job.channels;
  for (int64_t c = low; c < high; c += Vec::kWidth) {
    Vec::F sum = bias ? LoadValues(bias + c) : Vec::Set(0.0f);
    for (int64_t j = 0; j < before; ++j) {
      sum = Vec::Fma(Vec::Load(kept[j] + c), LoadValues(weight + j * job.channels + c), sum);
    }
    for (int64_t j = before; j < job.taps; ++j) {
      sum = Vec::Fma(LoadValues(inputs[j] + c), LoadValues(weight + j * job.channels + c), sum);
    }
    StoreValues(y + c, job.silu ? Silu(sum) : sum);
  }
}

template <typename Value, typename Weight>
void ConvolveTokens(const ConvJob& job, const StateRow& row, int64_t begin, int64_t end, int64_t low, int64_t high) {
  for (int64_t token = begin; token < end; ++token) {
    ConvolveToken<Value, Weight>(job, row, token, low, high);
  }
}

inline void Convolve(const ConvJob& job, const StateRow& row, int64_t begin, int64_t end, int64_t low, int64_t high) {
  const TinyIsZero tiny_is_zero;
  const auto run = job.bf16 ? (job.bf16_weights ? ConvolveTokens<uint16_t, uint16_t> : ConvolveTokens<uint16_t, float>)
                            : (job.bf16_weights ? ConvolveTokens<float, uint16_t> : ConvolveTokens<float, float>);
  run(job, row, begin, end, low, high);
}

inline void Keep(const ConvJob& job, const StateRow& row, int64_t low, int64_t high) {
  const auto keep = job.bf16 ? KeepInputs<uint16_t> : KeepInputs<float>;
  if (row.cut != 0) {
    keep(job, row, row.cut, row.cut_to, low, high);
  }
  if (row.to >= 0) {
    keep(job, row, row.count, row.to, low, high);
  }
}

}  // namespace
}  // namespace penstock
