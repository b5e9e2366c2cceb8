// One AdamW step in one pass over memory (arXiv 1711.05101, algorithm 2): operator schema and CPU kernel.
// realhf/ops/adamw.py documents the operator. Results do not depend on how elements are divided among threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "simd.h"

namespace realhf {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kElementsPerTask = 1 << 15;
constexpr int64_t kElementsInCache = 1 << 10;

struct State {
  float *master, *first, *second;
  const float* grad;
  BFloat16* rounded;  // the model's bfloat16 weights, if any
};

struct Step {
  float scale, kept, beta1, beta2, rate, root_scale, eps;
};

REALHF_SIMD_CLONES void update_some(float* __restrict__ master, float* __restrict__ first, float* __restrict__ second,
                                    const float* __restrict__ grad, int64_t count, const Step& given) {
  const Step step = given;
  for (int64_t i = 0; i < count; ++i) {
    const float slope = grad[i] * step.scale;
    const float mean = first[i] * step.beta1 + slope * (1.0f - step.beta1);
    const float square = second[i] * step.beta2 + slope * slope * (1.0f - step.beta2);
    first[i] = mean;
    second[i] = square;
    master[i] = master[i] * step.kept - mean * step.rate / (__builtin_sqrtf(square) * step.root_scale + step.eps);
  }
}

REALHF_SIMD_CLONES void round_some(const float* from, int64_t count, BFloat16* to) {
  for (int64_t i = 0; i < count; i += kLanes) store_upto(to + i, load_upto(from + i, count - i), count - i);
}

void update_run(const State& state, int64_t from, int64_t to, const Step& step) {
  for (int64_t at = from; at < to; at += kElementsInCache) {
    const int64_t count = std::min(kElementsInCache, to - at);
    update_some(state.master + at, state.first + at, state.second + at, state.grad + at, count, step);
    if (state.rounded) round_some(state.master + at, count, state.rounded + at);
  }
}

void check(const Tensor& given, int64_t size, ScalarType type) {
  STD_TORCH_CHECK(given.dim() == 1 && given.numel() == size && given.scalar_type() == type && given.is_contiguous(),
                  "adamw_: master, grad, first and second must be [", size, "] float32, rounded bfloat16, contiguous");
}

void adamw_cpu(Tensor master, const Tensor& grad, Tensor first, Tensor second, std::optional<Tensor> rounded,
               int64_t n_decayed, double lr, double beta1, double beta2, double eps, double weight_decay, int64_t steps,
               double scale) {
  const int64_t size = master.numel();
  for (const Tensor& given : {master, grad, first, second}) check(given, size, ScalarType::Float);
  if (rounded) check(*rounded, size, ScalarType::BFloat16);
  STD_TORCH_CHECK(n_decayed >= 0 && n_decayed <= size && steps > 0, "adamw_: ", n_decayed, " of ", size,
                  " elements decay, in step ", steps);
  const State state{master.mutable_data_ptr<float>(), first.mutable_data_ptr<float>(), second.mutable_data_ptr<float>(),
                    grad.const_data_ptr<float>(),
                    rounded ? static_cast<BFloat16*>(rounded->mutable_data_ptr()) : nullptr};
  Step plain{static_cast<float>(scale),
             1.0f,
             static_cast<float>(beta1),
             static_cast<float>(beta2),
             static_cast<float>(lr / (1.0 - std::pow(beta1, static_cast<double>(steps)))),
             static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, static_cast<double>(steps)))),
             static_cast<float>(eps)};
  Step decayed = plain;
  decayed.kept = static_cast<float>(1.0 - lr * weight_decay);
  torch::stable::parallel_for(0, size, kElementsPerTask, [&](int64_t from, int64_t to) {
    update_run(state, from, std::min(to, n_decayed), decayed);
    update_run(state, std::max(from, n_decayed), to, plain);
  });
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_FRAGMENT(realhf, library) {
  library.def(
      "adamw_(Tensor(a!) master, Tensor grad, Tensor(b!) first, Tensor(c!) second, Tensor(d!)? rounded, int n_decayed,"
      " float lr, float beta1, float beta2, float eps, float weight_decay, int steps, float scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(realhf, CPU, library) { library.impl("adamw_", TORCH_BOX(&realhf::adamw_cpu)); }
