// The activations of gated layers, out = act(gate) * up, and of layers without a gate. activate.h computes them.
#pragma once

#include <cstdint>

namespace penstock {

// The numbers are those of ACTIVATIONS in activations.py.
enum class Activation : int { kNone = 0, kSilu = 1, kGeluTanh = 2, kGptOss = 3, kSigmoid = 4 };

// An activation of a layer without a gate. The numbers are those of norm.py.
enum class Plain : int { kNone = 0, kGelu = 1, kGeluTanh = 2 };

// Whether an operation's attribute is the number of a gated activation.
constexpr bool IsGated(int64_t number) {
  return number >= static_cast<int64_t>(Activation::kSilu) && number <= static_cast<int64_t>(Activation::kSigmoid);
}

}  // namespace penstock
