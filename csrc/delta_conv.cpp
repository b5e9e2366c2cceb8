// The causal convolution of each channel over packed rows, then silu, with gradients: operator schemas and CPU kernels.
// realhf/ops/delta/convolution.py documents the operators. Threads divide the channels, so a sum over tokens is of one
// thread.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "activations.h"
#include "delta_table.h"
#include "rope.h"

namespace realhf {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kMaxTaps = 16, kChannels = 64;  // of a filter; that a thread computes together
constexpr int64_t kPart = 128;                    // tokens whose products are summed in float32

struct ConvShape {
  int64_t channels, taps;
};

// All rows; `order` has first those that continue others.
struct ConvRows {
  const DeltaRow* rows;
  const int64_t* order;
  int64_t count;
};

// Weights and their gradients are [taps, channels].
template <typename scalar_t>
struct ConvData {
  const scalar_t *x, *grad;
  const float* weight;
  scalar_t *y, *x_grad;
  double* weight_grad;
};

#define REALHF_KERNEL_FILE "delta_conv_rows.h"
#include "multi_isa.h"

ConvShape checked_conv(const Tensor& x, const Tensor& weight, const DeltaTable& table) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.size(0) == table.tokens && x.size(1) > 0 &&
                      x.size(1) % kLanes == 0 && x.size(1) <= kMaxSize,
                  "causal_conv_silu: x must be [T, C], contiguous, C a multiple of ", kLanes);
  STD_TORCH_CHECK(weight.dim() == 3 && weight.size(0) == x.size(1) && weight.size(1) == 1 && weight.size(2) > 0 &&
                      weight.size(2) <= kMaxTaps && weight.is_contiguous(),
                  "causal_conv_silu: weight must be [C, 1, kernel <= ", kMaxTaps, "], contiguous");
  STD_TORCH_CHECK(x.scalar_type() == weight.scalar_type() &&
                      (x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16),
                  "causal_conv_silu: x and weight must be float32 or bfloat16, of the same type");
  return {x.size(1), weight.size(2)};
}

template <typename scalar_t>
void run(const ConvShape& shape, const DeltaTable& table, const Tensor& weight, ConvData<scalar_t> data) {
  std::unique_ptr<float[]> by_tap(new float[shape.taps * shape.channels]);
  const auto* given = static_cast<const scalar_t*>(weight.const_data_ptr());
  for (int64_t c = 0; c < shape.channels; ++c) {
    for (int64_t tap = 0; tap < shape.taps; ++tap) {
      by_tap[tap * shape.channels + c] = as_float(given[c * shape.taps + tap]);
    }
  }
  data.weight = by_tap.get();
  using Work = void (*)(const ConvShape&, const ConvRows&, const ConvData<scalar_t>&, int64_t, int64_t);
  const auto work = data.y != nullptr ? best_isa<Work>(REALHF_ALL_ISAS(conv_forward))
                                      : best_isa<Work>(REALHF_ALL_ISAS(conv_backward));
  std::vector<int64_t> order = table.children;
  order.insert(order.end(), table.roots.begin(), table.roots.end());
  const ConvRows rows{table.rows.data(), order.data(), static_cast<int64_t>(order.size())};
  const int64_t n_parts = (shape.channels + kChannels - 1) / kChannels;
  torch::stable::parallel_for(0, n_parts, 1, [&](int64_t first, int64_t stop) {
    for (int64_t part = first; part < stop; ++part) {
      work(shape, rows, data, part * kChannels, std::min(shape.channels, (part + 1) * kChannels));
    }
  });
}

Tensor causal_conv_silu_cpu(const Tensor& x, const Tensor& weight, const Tensor& rows) {
  const DeltaTable table = checked_table(rows);
  const ConvShape shape = checked_conv(x, weight, table);
  Tensor y = torch::stable::new_empty(x, {table.tokens, shape.channels});
  const auto of = [&](auto scalar) {
    using scalar_t = decltype(scalar);
    ConvData<scalar_t> data{};
    data.x = static_cast<const scalar_t*>(x.const_data_ptr()), data.y = static_cast<scalar_t*>(y.mutable_data_ptr());
    if (table.tokens > 0) run<scalar_t>(shape, table, weight, data);
  };
  x.scalar_type() == ScalarType::Float ? of(0.0f) : of(BFloat16{});
  return y;
}

std::tuple<Tensor, Tensor> causal_conv_silu_backward_cpu(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                         const Tensor& rows) {
  const DeltaTable table = checked_table(rows);
  const ConvShape shape = checked_conv(x, weight, table);
  STD_TORCH_CHECK(grad.dim() == 2 && grad.size(0) == table.tokens && grad.size(1) == shape.channels &&
                      grad.is_contiguous() && grad.scalar_type() == x.scalar_type(),
                  "causal_conv_silu_backward: grad must be like x");
  Tensor x_grad = torch::stable::new_empty(x, {table.tokens, shape.channels});
  Tensor weight_grad = torch::stable::new_empty(weight, {shape.channels, 1, shape.taps}, ScalarType::Float);
  std::unique_ptr<double[]> sums(new double[shape.taps * shape.channels]());
  const auto of = [&](auto scalar) {
    using scalar_t = decltype(scalar);
    ConvData<scalar_t> data{};
    data.x = static_cast<const scalar_t*>(x.const_data_ptr());
    data.grad = static_cast<const scalar_t*>(grad.const_data_ptr());
    data.x_grad = static_cast<scalar_t*>(x_grad.mutable_data_ptr()), data.weight_grad = sums.get();
    if (table.tokens > 0) run<scalar_t>(shape, table, weight, data);
  };
  x.scalar_type() == ScalarType::Float ? of(0.0f) : of(BFloat16{});
  float* const to = weight_grad.mutable_data_ptr<float>();
  for (int64_t c = 0; c < shape.channels; ++c) {
    for (int64_t tap = 0; tap < shape.taps; ++tap) {
      to[c * shape.taps + tap] = static_cast<float>(sums[tap * shape.channels + c]);
    }
  }
  return {x_grad, weight_grad};
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_FRAGMENT(realhf, library) {
  library.def("causal_conv_silu(Tensor x, Tensor weight, Tensor rows) -> Tensor");
  library.def(
      "causal_conv_silu_backward(Tensor grad, Tensor x, Tensor weight, Tensor rows)"
      " -> (Tensor x_grad, Tensor weight_grad)");
}

STABLE_TORCH_LIBRARY_IMPL(realhf, CPU, library) {
  library.impl("causal_conv_silu", TORCH_BOX(&realhf::causal_conv_silu_cpu));
  library.impl("causal_conv_silu_backward", TORCH_BOX(&realhf::causal_conv_silu_backward_cpu));
}
