// The activations of gated layers: out = act(gate) * up. activate.h computes them.
#pragma once

#include <cstdint>

namespace penstock {

// The numbers are those of ACTIVATIONS in activations.py.
enum class Activation : int { kNone = 0, kSilu = 1, kGeluTanh = 2, kGptOss = 3, kSigmoid = 4 };

// Whether an operation's attribute is the number of a gated activation.
constexpr bool IsGated(int64_t number) {
  return number >= static_cast<int64_t>(Activation::kSilu) && number <= static_cast<int64_t>(Activation::kSigmoid);
}

}  // namespace penstock
