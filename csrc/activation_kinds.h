// The MLP activations that have kernels, numbered as KERNEL_ACTIVATIONS of realhf/api/model_config.py; the decoding
// kernel also has `clamped_swiglu`, which is always gated.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace realhf {

enum class Activation : int64_t { silu, gelu, gelu_tanh, clamped_swiglu };

constexpr float kClamp = 7.0f, kQuickGelu = 1.702f;  // of gpt-oss
constexpr float kRootOfHalf = 0.70710678118f, kRootOfTwoOverPi = 0.79788456080f, kCubic = 0.044715f;

struct ActivationSizes {
  int64_t rows, across, inner;
};

inline ActivationSizes checked_activation(const torch::stable::Tensor& x, int64_t activation, bool gated) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && (!gated || x.size(1) % 2 == 0),
                  "activate: x must be [T, inner] or, gated, [T, 2 * inner], contiguous");
  STD_TORCH_CHECK(activation >= 0 && activation <= 2, "activate: activation ", activation);
  return {x.size(0), x.size(1), gated ? x.size(1) / 2 : x.size(1)};
}

inline void check_activation_grad(const torch::stable::Tensor& grad, const torch::stable::Tensor& x,
                                  const ActivationSizes& sizes) {
  STD_TORCH_CHECK(grad.dim() == 2 && grad.size(0) == sizes.rows && grad.size(1) == sizes.inner &&
                      grad.is_contiguous() && grad.scalar_type() == x.scalar_type(),
                  "activate_backward: grad must be [", sizes.rows, ", ", sizes.inner, "], typed as x, contiguous");
}

}  // namespace realhf
