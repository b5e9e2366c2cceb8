// RMSNorm (arXiv 1910.07467) and its gradients, in one pass each: operator schemas and CPU kernels.
// realhf/ops/norms.py documents the operators. The weight's gradient is summed over fixed blocks of rows, then over
// blocks in order, so that it does not depend on the number of threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <tuple>

#include "simd.h"

namespace realhf {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kElementsPerTask = 1 << 14;
constexpr int64_t kRowsPerBlock = 128;

REALHF_INLINE float scale_of(const float* x, int64_t size, float eps) {
  Floats squares = {};
  for_each_vec(size, [&](int64_t i, auto lanes) REALHF_BODY {
    const Floats some = lanes.load(x + i);
    squares += some * some;
  });
  return 1.0f / __builtin_sqrtf(static_cast<float>(sum_of_lanes(squares) / static_cast<double>(size)) + eps);
}

REALHF_SIMD_CLONES void forward_row(const float* x, const float* weight, int64_t size, float eps, float* y) {
  const float scale = scale_of(x, size, eps);
  for_each_vec(size, [=](int64_t i, auto lanes)
                         REALHF_BODY { lanes.store(y + i, lanes.load(x + i) * scale * lanes.load(weight + i)); });
}

REALHF_SIMD_CLONES void backward_row(const float* grad, const float* x, const float* weight, int64_t size, float eps,
                                     float* x_grad, float* weight_grad) {
  const float scale = scale_of(x, size, eps);
  Floats sum = {};
  for_each_vec(size, [&](int64_t i, auto lanes) REALHF_BODY {
    const Floats part = lanes.load(grad + i) * (lanes.load(x + i) * scale);
    sum += part * lanes.load(weight + i);
    lanes.store(weight_grad + i, lanes.load(weight_grad + i) + part);
  });
  const float along = static_cast<float>(sum_of_lanes(sum) / static_cast<double>(size));
  for_each_vec(size, [=](int64_t i, auto lanes) REALHF_BODY {
    const Floats slope = lanes.load(grad + i) * lanes.load(weight + i);
    lanes.store(x_grad + i, (slope - lanes.load(x + i) * scale * along) * scale);
  });
}

void check(const Tensor& x, const Tensor& weight) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.scalar_type() == ScalarType::Float && x.size(1) > 0 &&
                      weight.dim() == 1 && weight.size(0) == x.size(1) && weight.is_contiguous() &&
                      weight.scalar_type() == ScalarType::Float,
                  "rms_norm: x must be [T, D] and weight [D], float32, contiguous");
}

Tensor rms_norm_cpu(const Tensor& x, const Tensor& weight, double eps) {
  check(x, weight);
  Tensor y = torch::stable::new_empty(x, {x.size(0), x.size(1)});
  const int64_t size = x.size(1);
  const float *from = x.const_data_ptr<float>(), *scales = weight.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, x.size(0), kElementsPerTask / size + 1, [&](int64_t first, int64_t stop) {
    for (int64_t row = first; row < stop; ++row) {
      forward_row(from + row * size, scales, size, static_cast<float>(eps), to + row * size);
    }
  });
  return y;
}

std::tuple<Tensor, Tensor> rms_norm_backward_cpu(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                 double eps) {
  check(x, weight);
  STD_TORCH_CHECK(grad.dim() == 2 && grad.size(0) == x.size(0) && grad.size(1) == x.size(1) && grad.is_contiguous() &&
                      grad.scalar_type() == ScalarType::Float,
                  "rms_norm_backward: grad must be like x");
  const int64_t rows = x.size(0), size = x.size(1), n_blocks = (rows + kRowsPerBlock - 1) / kRowsPerBlock;
  Tensor x_grad = torch::stable::new_empty(x, {rows, size});
  Tensor weight_grad = torch::stable::new_empty(x, {size});
  Tensor of_blocks = torch::stable::new_empty(x, {n_blocks, size});
  const float *along = grad.const_data_ptr<float>(), *from = x.const_data_ptr<float>();
  const float* scales = weight.const_data_ptr<float>();
  float *to = x_grad.mutable_data_ptr<float>(), *parts = of_blocks.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, n_blocks, 1, [&](int64_t first, int64_t stop) {
    for (int64_t block = first; block < stop; ++block) {
      std::fill_n(parts + block * size, size, 0.0f);
      for (int64_t row = block * kRowsPerBlock; row < std::min(rows, (block + 1) * kRowsPerBlock); ++row) {
        backward_row(along + row * size, from + row * size, scales, size, static_cast<float>(eps), to + row * size,
                     parts + block * size);
      }
    }
  });
  float* total = weight_grad.mutable_data_ptr<float>();
  std::fill_n(total, size, 0.0f);
  for (int64_t block = 0; block < n_blocks; ++block) {
    for (int64_t i = 0; i < size; ++i) total[i] += parts[block * size + i];
  }
  return {x_grad, weight_grad};
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_FRAGMENT(realhf, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def(
      "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, float eps) -> (Tensor x_grad, Tensor weight_grad)");
  library.def("rotate(Tensor x, Tensor angles, Tensor positions, bool inverse) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(realhf, CPU, library) {
  library.impl("rms_norm", TORCH_BOX(&realhf::rms_norm_cpu));
  library.impl("rms_norm_backward", TORCH_BOX(&realhf::rms_norm_backward_cpu));
}
