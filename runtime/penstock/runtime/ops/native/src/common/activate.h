// The activations of activations.h. In an unnamed namespace, like lanes.h.
#pragma once

#include "common/activations.h"
#include "common/lanes.h"

namespace penstock {
namespace {

// x * sigmoid(slope)
inline Lanes Gated(Lanes x, Lanes slope) { return Div(x, Add(Fill(1.0f), Exp(Mul(slope, Fill(-1.0f))))); }

// The activation is not kNone. Only kGptOss reads `limit`: it bounds the gate from above, and the size of up. NaN in
// either operand stays NaN.
inline Lanes Activate(Activation activation, float limit, Lanes gate, Lanes up) {
  if (activation == Activation::kGptOss) {
    const Lanes bounded = Clip(gate, -__builtin_inff(), limit);
    return Mul(Gated(bounded, Mul(bounded, Fill(1.702f))), Add(Clip(up, -limit, limit), Fill(1.0f)));
  }
  if (activation == Activation::kGeluTanh) {
    // (1 + tanh(u)) / 2 is sigmoid(2 u), and u is sqrt(2 / pi) * (x + 0.044715 x^3).
    const Lanes cubic = Add(Fill(1.0f), Mul(Fill(0.044715f), Mul(gate, gate)));
    return Mul(Gated(gate, Mul(Mul(gate, Fill(1.5957691216057308f)), cubic)), up);
  }
  if (activation == Activation::kSigmoid) {
    // Exp takes NaN for a number. The other activations multiply by the gate, which brings it back; this one adds
    // nothing, or NaN.
    return Add(Gated(up, gate), Mul(Clip(gate, -1.0f, 1.0f), Fill(0.0f)));
  }
  return Mul(Gated(gate, gate), up);
}

}  // namespace
}  // namespace penstock
