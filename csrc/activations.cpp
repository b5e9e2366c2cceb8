// MLP activations, optionally gated, and their gradients, in one pass each: operator schemas and CPU kernels.
// realhf/ops/activations.py documents the operators.
#include "activations.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>

#include "rope.h"

namespace realhf {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kElementsPerTask = 1 << 14;

#define REALHF_KERNEL_FILE "activation_rows.h"
#include "multi_isa.h"

template <Activation activation, typename scalar_t>
void forward(const ActivationSizes& sizes, const Tensor& x, Tensor& out) {
  const auto* from = static_cast<const scalar_t*>(x.const_data_ptr());
  auto* to = static_cast<scalar_t*>(out.mutable_data_ptr());
  const auto run = best_isa(REALHF_ALL_ISAS(forward_row<activation, scalar_t>));
  torch::stable::parallel_for(0, sizes.rows, kElementsPerTask / sizes.across + 1, [&](int64_t first, int64_t stop) {
    for (int64_t row = first; row < stop; ++row) {
      const scalar_t* of_row = from + row * sizes.across;
      run(of_row, sizes.across > sizes.inner ? of_row + sizes.inner : nullptr, sizes.inner, to + row * sizes.inner);
    }
  });
}

template <Activation activation, typename scalar_t>
void backward(const ActivationSizes& sizes, const Tensor& grad, const Tensor& x, Tensor& x_grad) {
  const auto* along = static_cast<const scalar_t*>(grad.const_data_ptr());
  const auto* from = static_cast<const scalar_t*>(x.const_data_ptr());
  auto* to = static_cast<scalar_t*>(x_grad.mutable_data_ptr());
  const auto run = best_isa(REALHF_ALL_ISAS(backward_row<activation, scalar_t>));
  torch::stable::parallel_for(0, sizes.rows, kElementsPerTask / sizes.across + 1, [&](int64_t first, int64_t stop) {
    for (int64_t row = first; row < stop; ++row) {
      const scalar_t* of_row = from + row * sizes.across;
      scalar_t* grad_of_row = to + row * sizes.across;
      run(along + row * sizes.inner, of_row, sizes.across > sizes.inner ? of_row + sizes.inner : nullptr, sizes.inner,
          grad_of_row, grad_of_row + sizes.inner);
    }
  });
}

// Calls `with` with the activation and the element type as compile-time constants.
template <typename With>
void by_kind(int64_t activation, ScalarType type, const With& with) {
  const auto typed = [&](auto kind) {
    if (type == ScalarType::Float) {
      with(kind, float{});
    } else {
      with(kind, BFloat16{});
    }
  };
  switch (static_cast<Activation>(activation)) {
    case Activation::silu:
      return typed(std::integral_constant<Activation, Activation::silu>{});
    case Activation::gelu:
      return typed(std::integral_constant<Activation, Activation::gelu>{});
    case Activation::gelu_tanh:
      return typed(std::integral_constant<Activation, Activation::gelu_tanh>{});
  }
}

ActivationSizes checked(const Tensor& x, int64_t activation, bool gated) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16,
                  "activate: x must be float32 or bfloat16");
  return checked_activation(x, activation, gated);
}

Tensor activate_cpu(const Tensor& x, int64_t activation, bool gated) {
  const ActivationSizes sizes = checked(x, activation, gated);
  Tensor out = torch::stable::new_empty(x, {sizes.rows, sizes.inner});
  if (out.numel() == 0) return out;
  by_kind(activation, x.scalar_type(),
          [&](auto kind, auto number) { forward<decltype(kind)::value, decltype(number)>(sizes, x, out); });
  return out;
}

Tensor activate_backward_cpu(const Tensor& grad, const Tensor& x, int64_t activation, bool gated) {
  const ActivationSizes sizes = checked(x, activation, gated);
  check_activation_grad(grad, x, sizes);
  Tensor x_grad = torch::stable::new_empty(x, {sizes.rows, sizes.across});
  if (x_grad.numel() == 0) return x_grad;
  by_kind(activation, x.scalar_type(),
          [&](auto kind, auto number) { backward<decltype(kind)::value, decltype(number)>(sizes, grad, x, x_grad); });
  return x_grad;
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_FRAGMENT(realhf, library) {
  library.def("activate(Tensor x, int activation, bool gated) -> Tensor");
  library.def("activate_backward(Tensor grad, Tensor x, int activation, bool gated) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(realhf, CPU, library) {
  library.impl("activate", TORCH_BOX(&realhf::activate_cpu));
  library.impl("activate_backward", TORCH_BOX(&realhf::activate_backward_cpu));
}
