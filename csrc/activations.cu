// MLP activations, optionally gated, and their gradients, in one pass each: CUDA kernels, one thread block per row.
// realhf/ops/activations.py documents the operators, activations.cpp has the schemas.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>

#include "activation_kinds.h"
#include "device.h"
#include "device_floats.h"

namespace realhf {
namespace {

using torch::stable::Tensor;

constexpr int kThreads = 256;

struct Slope {
  float value, slope;
};

__device__ Slope activated(Activation activation, float x) {
  if (activation == Activation::silu) {
    const float share = 1.0f / (1.0f + expf(-x)), value = x * share;
    return {value, share + value * (1.0f - share)};
  }
  if (activation == Activation::gelu) {
    const float share = (erff(x * kRootOfHalf) + 1.0f) * 0.5f;
    return {x * share, share + x * expf(x * x * -0.5f) * (kRootOfTwoOverPi * 0.5f)};
  }
  const float bend = tanhf((x + x * x * x * kCubic) * kRootOfTwoOverPi), share = (bend + 1.0f) * 0.5f;
  const float inner = (x * x * (3.0f * kCubic) + 1.0f) * kRootOfTwoOverPi;
  return {x * share, share + x * 0.5f * (1.0f - bend * bend) * inner};
}

// A row of x has `inner` packs or, gated, twice as many: those of the gate come first.
template <typename pack_t>
__global__ void __launch_bounds__(kThreads)
    forward(const pack_t* x, Activation activation, bool gated, int64_t inner, pack_t* out) {
  x += static_cast<int64_t>(blockIdx.x) * inner * (gated ? 2 : 1);
  out += static_cast<int64_t>(blockIdx.x) * inner;
  for (int64_t i = threadIdx.x; i < inner; i += kThreads) {
    const pack_t gate = x[i], up = gated ? x[inner + i] : gate;
    pack_t result;
    for (int j = 0; j < pack_t::kCount; ++j) {
      const float value = activated(activation, value_of(gate.at[j])).value;
      assign(result.at[j], gated ? value * value_of(up.at[j]) : value);
    }
    out[i] = result;
  }
}

template <typename pack_t>
__global__ void __launch_bounds__(kThreads)
    backward(const pack_t* grad, const pack_t* x, Activation activation, bool gated, int64_t inner, pack_t* x_grad) {
  const int64_t start = static_cast<int64_t>(blockIdx.x) * inner * (gated ? 2 : 1);
  x += start;
  x_grad += start;
  grad += static_cast<int64_t>(blockIdx.x) * inner;
  for (int64_t i = threadIdx.x; i < inner; i += kThreads) {
    const pack_t along = grad[i], gate = x[i], up = gated ? x[inner + i] : gate;
    pack_t gate_grad, up_grad;
    for (int j = 0; j < pack_t::kCount; ++j) {
      const Slope found = activated(activation, value_of(gate.at[j]));
      const float slope = value_of(along.at[j]);
      assign(up_grad.at[j], slope * found.value);
      assign(gate_grad.at[j], (gated ? slope * value_of(up.at[j]) : slope) * found.slope);
    }
    x_grad[i] = gate_grad;
    if (gated) x_grad[inner + i] = up_grad;
  }
}

Tensor activate_cuda(const Tensor& x, int64_t activation, bool gated) {
  const ActivationSizes sizes = checked_activation(x, activation, gated);
  Tensor out = torch::stable::new_empty(x, {sizes.rows, sizes.inner});
  if (out.numel() == 0) return out;
  const Launch on(x);
  for_type("activate", x, [&](auto* type) {
    using scalar_t = std::remove_pointer_t<decltype(type)>;
    for_pack<scalar_t>({x.const_data_ptr(), out.const_data_ptr()}, {sizes.inner}, [&](auto* packs) {
      using pack_t = std::remove_pointer_t<decltype(packs)>;
      forward<<<blocks_for(sizes.rows, 1), kThreads, 0, on.stream()>>>(
          static_cast<const pack_t*>(x.const_data_ptr()), static_cast<Activation>(activation), gated,
          sizes.inner / pack_t::kCount, static_cast<pack_t*>(out.mutable_data_ptr()));
    });
  });
  on.check("activate");
  return out;
}

Tensor activate_backward_cuda(const Tensor& grad, const Tensor& x, int64_t activation, bool gated) {
  const ActivationSizes sizes = checked_activation(x, activation, gated);
  check_activation_grad(grad, x, sizes);
  Tensor x_grad = torch::stable::new_empty(x, {sizes.rows, sizes.across});
  if (x_grad.numel() == 0) return x_grad;
  const Launch on(x);
  for_type("activate_backward", x, [&](auto* type) {
    using scalar_t = std::remove_pointer_t<decltype(type)>;
    const auto addresses = {grad.const_data_ptr(), x.const_data_ptr(), x_grad.const_data_ptr()};
    for_pack<scalar_t>(addresses, {sizes.inner}, [&](auto* packs) {
      using pack_t = std::remove_pointer_t<decltype(packs)>;
      backward<<<blocks_for(sizes.rows, 1), kThreads, 0, on.stream()>>>(
          static_cast<const pack_t*>(grad.const_data_ptr()), static_cast<const pack_t*>(x.const_data_ptr()),
          static_cast<Activation>(activation), gated, sizes.inner / pack_t::kCount,
          static_cast<pack_t*>(x_grad.mutable_data_ptr()));
    });
  });
  on.check("activate_backward");
  return x_grad;
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_IMPL(realhf, CUDA, library) {
  library.impl("activate", TORCH_BOX(&realhf::activate_cuda));
  library.impl("activate_backward", TORCH_BOX(&realhf::activate_backward_cuda));
}
