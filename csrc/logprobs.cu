// The softmax of log-probabilities for one tile of logits: CUDA kernels, one thread block per row.
// realhf/ops/logprobs.py documents the operators, logprobs.cpp has the schemas.
#include <cmath>
#include <tuple>

#include "block_reduce.h"
#include "device_floats.h"
#include "logprobs.h"

namespace realhf {
namespace {

constexpr int kThreads = 512;

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads)
    stats(const scalar_t* logits, const int64_t* targets, int64_t size, float scale, float* largest, float* sums,
          float* picked) {
  const int64_t row = blockIdx.x;
  logits += row * size;
  float most = -INFINITY;
  for (int64_t i = threadIdx.x; i < size; i += kThreads) most = fmaxf(most, value_of(logits[i]) * scale);
  most = over_block<kThreads>(most, [](float a, float b) { return fmaxf(a, b); });
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < size; i += kThreads) sum += expf(value_of(logits[i]) * scale - most);
  sum = over_block<kThreads>(sum, [](float a, float b) { return a + b; });
  if (threadIdx.x == 0) {
    largest[row] = most;
    sums[row] = sum;
    const int64_t target = targets[row];
    picked[row] = target >= 0 && target < size ? value_of(logits[target]) * scale : 0.0f;
  }
}

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads)
    slopes(scalar_t* logits, const int64_t* targets, const float* normalisers, const float* logprobs,
           const float* grads, int64_t size, float scale) {
  const int64_t row = blockIdx.x;
  logits += row * size;
  const int64_t target = targets[row];
  const float slope = grads[row] * scale, normaliser = normalisers[row];
  for (int64_t i = threadIdx.x; i < size; i += kThreads) {
    const float less = i == target ? expm1f(logprobs[row]) : expf(value_of(logits[i]) * scale - normaliser);
    assign(logits[i], -slope * less);
  }
}

std::tuple<Tensor, Tensor, Tensor> logit_stats_cuda(const Tensor& logits, const Tensor& targets, double scale) {
  check_logits("logit_stats", logits, targets);
  const Tensor wanted = torch::stable::contiguous(targets);
  Tensor largest = empty_per_row(targets), sums = empty_per_row(targets), picked = empty_per_row(targets);
  if (targets.numel() == 0) return {largest, sums, picked};
  const Launch on(logits);
  for_type("logit_stats", logits, [&](auto* type) {
    using scalar_t = std::remove_pointer_t<decltype(type)>;
    stats<<<blocks_for(targets.numel(), 1), kThreads, 0, on.stream()>>>(
        static_cast<const scalar_t*>(logits.const_data_ptr()), wanted.const_data_ptr<int64_t>(), logits.size(1),
        static_cast<float>(scale), largest.mutable_data_ptr<float>(), sums.mutable_data_ptr<float>(),
        picked.mutable_data_ptr<float>());
  });
  on.check("logit_stats");
  return {largest, sums, picked};
}

void logit_slopes_cuda(Tensor logits, const Tensor& targets, const Tensor& normalisers, const Tensor& logprobs,
                       const Tensor& grads, double scale) {
  check_logits("logit_slopes_", logits, targets);
  for (const Tensor* given : {&normalisers, &logprobs, &grads}) check_per_row("logit_slopes_", *given, targets);
  if (targets.numel() == 0) return;
  const Tensor wanted = torch::stable::contiguous(targets), shifts = torch::stable::contiguous(normalisers),
               chosen = torch::stable::contiguous(logprobs), weights = torch::stable::contiguous(grads);
  const Launch on(logits);
  for_type("logit_slopes_", logits, [&](auto* type) {
    using scalar_t = std::remove_pointer_t<decltype(type)>;
    slopes<<<blocks_for(targets.numel(), 1), kThreads, 0, on.stream()>>>(
        static_cast<scalar_t*>(logits.mutable_data_ptr()), wanted.const_data_ptr<int64_t>(),
        shifts.const_data_ptr<float>(), chosen.const_data_ptr<float>(), weights.const_data_ptr<float>(), logits.size(1),
        static_cast<float>(scale));
  });
  on.check("logit_slopes_");
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_IMPL(realhf, CUDA, library) {
  library.impl("logit_stats", TORCH_BOX(&realhf::logit_stats_cuda));
  library.impl("logit_slopes_", TORCH_BOX(&realhf::logit_slopes_cuda));
}
