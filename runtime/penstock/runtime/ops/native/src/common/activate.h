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

// x (1 + erf(x / sqrt 2)) / 2, which is max(x, 0) - |x| erfc(|x| / sqrt 2) / 2. The polynomial of erfc is Chebyshev's,
// to 1.2e-7 of each value (Press et al., Numerical Recipes, 6.2).
inline Lanes Gelu(Lanes x) {
  constexpr float kTerms[] = {0.17087277f,  -0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f,
                              -0.18628806f, 0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
  const Lanes above = Clip(x, 0.0f, __builtin_inff()), size = Sub(above, Clip(x, -__builtin_inff(), 0.0f));
  const Lanes z = Mul(size, Fill(0.70710678f));
  const Lanes t = Div(Fill(1.0f), Add(Fill(1.0f), Mul(Fill(0.5f), z)));
  Lanes power = Fill(kTerms[0]);
  for (int i = 1; i < 10; ++i) {
    power = Add(Mul(power, t), Fill(kTerms[i]));
  }
  const Lanes erfc = Mul(t, Exp(Sub(power, Mul(z, z))));
  return Sub(above, Mul(Mul(size, Fill(0.5f)), erfc));
}

// The activation of a layer without a gate, which is not kNone.
inline Lanes Activate(Plain plain, Lanes x) {
  return plain == Plain::kGelu ? Gelu(x) : Activate(Activation::kGeluTanh, 0.0f, x, Fill(1.0f));
}

}  // namespace
}  // namespace penstock
