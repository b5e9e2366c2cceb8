// MLP activations and their derivatives on float32 vectors.
#pragma once

#include "activation_kinds.h"
#include "simd.h"

namespace realhf {

REALHF_INLINE Floats tanh_of(const Floats& x) {
  const Floats shrunk = exp_of(abs_of(x) * -2.0f);
  return copysign_of((1.0f - shrunk) / (1.0f + shrunk), x);
}

REALHF_INLINE Floats erf_of(const Floats& x) {  // Abramowitz and Stegun 7.1.26, to 1.5e-7
  const Floats size = abs_of(x), t = 1.0f / (size * 0.3275911f + 1.0f);
  Floats poly = t * 1.061405429f - 1.453152027f;
  poly = poly * t + 1.421413741f;
  poly = poly * t - 0.284496736f;
  poly = poly * t + 0.254829592f;
  return copysign_of(1.0f - poly * t * exp_of(-size * size), x);
}

REALHF_INLINE Floats sigmoid(const Floats& x) {
  const Floats shrunk = exp_of(-abs_of(x)), share = 1.0f / (1.0f + shrunk);
  return select(is_negative((Ints)x), shrunk * share, share);
}

struct Slope {
  Floats value, slope;
};

template <Activation activation>
REALHF_INLINE Floats activated(const Floats& x) {
  if (activation == Activation::silu) return x * sigmoid(x);
  if (activation == Activation::gelu) return x * 0.5f * (erf_of(x * kRootOfHalf) + 1.0f);
  return x * 0.5f * (tanh_of((x + x * x * x * kCubic) * kRootOfTwoOverPi) + 1.0f);
}

template <Activation activation>
REALHF_INLINE Slope activated_with_slope(const Floats& x) {
  if (activation == Activation::silu) {
    const Floats share = sigmoid(x), value = x * share;
    return {value, share + value * (1.0f - share)};
  }
  if (activation == Activation::gelu) {
    const Floats share = (erf_of(x * kRootOfHalf) + 1.0f) * 0.5f;
    const Floats density = exp_of(x * x * -0.5f) * (kRootOfTwoOverPi * 0.5f);
    return {x * share, share + x * density};
  }
  const Floats bend = (x + x * x * x * kCubic) * kRootOfTwoOverPi, shrunk = exp_of(abs_of(bend) * -2.0f);
  const Floats part = 1.0f / (1.0f + shrunk), share = select(is_negative((Ints)bend), shrunk * part, part);
  const Floats inner = (x * x * (3.0f * kCubic) + 1.0f) * kRootOfTwoOverPi;
  return {x * share, share + x * (shrunk * part * part) * inner * 2.0f};  // 1 - tanh^2 = 4 s / (1 + s)^2, s = e^-2|x|
}

}  // namespace realhf
