// The softmax of log-probabilities for one tile of logits: operator schemas and CPU kernels.
// realhf/ops/logprobs.py documents the operators; torch computes the matrix products.
#include "logprobs.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "simd.h"

namespace realhf {
namespace {

constexpr int64_t kElementsPerTask = 1 << 15;
constexpr int64_t kBlock = 64 * kLanes;  // elements summed in float32

template <typename scalar_t>
struct Lowest;
template <>
struct Lowest<float> {
  static constexpr float value = -kInfinity;
};
template <>
struct Lowest<BFloat16> {
  static constexpr BFloat16 value{0xff80};
};

template <typename scalar_t>
REALHF_SIMD_CLONES float row_largest(const scalar_t* row, int64_t size) {
  Floats most[4];
  for (Floats& lanes : most) lanes = Floats{} - kInfinity;
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
    for (int part = 0; part < 4; ++part) most[part] = larger(load(row + i + part * kLanes), most[part]);
  }
  for (; i < size; i += kLanes) {
    most[0] = larger(load_some(row + i, std::min(kLanes, size - i), Lowest<scalar_t>::value), most[0]);
  }
  return largest_lane(larger(larger(most[0], most[1]), larger(most[2], most[3])));
}

// Sum of e^(scale * row - largest).
template <typename scalar_t>
REALHF_SIMD_CLONES double row_exp_sum(const scalar_t* row, int64_t size, float scale, float largest) {
  double sum = 0.0;
  for (int64_t first = 0; first < size; first += kBlock) {
    const int64_t stop = std::min(first + kBlock, size);
    Floats lanes[2] = {};
    int64_t i = first;
    for (; i + 2 * kLanes <= stop; i += 2 * kLanes) {
      lanes[0] += exp_of(load(row + i) * scale - largest);
      lanes[1] += exp_of(load(row + i + kLanes) * scale - largest);
    }
    for (; i < stop; i += kLanes) {
      const Floats some = load_some(row + i, std::min(kLanes, stop - i), Lowest<scalar_t>::value);
      lanes[0] += exp_of(some * scale - largest);
    }
    sum += sum_of_lanes(lanes[0] + lanes[1]);
  }
  return sum;
}

// row = slope * e^(scale * row - normaliser)
template <typename scalar_t>
REALHF_SIMD_CLONES void row_slopes(scalar_t* row, int64_t size, float scale, float normaliser, float slope) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(row + i, exp_of(load(row + i) * scale - normaliser) * slope);
  if (i < size) {
    scalar_t end[kLanes];
    store(end, exp_of(load_some(row + i, size - i, Lowest<scalar_t>::value) * scale - normaliser) * slope);
    std::memcpy(row + i, end, (size - i) * sizeof(scalar_t));
  }
}

float value_of(float x) { return x; }
float value_of(BFloat16 x) { return load_some(&x, 1, BFloat16{0})[0]; }
void assign(float* to, float value) { *to = value; }
void assign(BFloat16* to, float value) {
  BFloat16 lanes[kLanes];
  store(lanes, Floats{} + value);
  *to = lanes[0];
}

int64_t rows_per_task(const Tensor& logits) { return kElementsPerTask / (logits.size(1) + 1) + 1; }

template <typename scalar_t>
void stats(const Tensor& logits, const int64_t* targets, float scale, float* largest, float* sums, float* picked) {
  const auto* all = static_cast<const scalar_t*>(logits.const_data_ptr());
  const int64_t size = logits.size(1);
  torch::stable::parallel_for(0, logits.size(0), rows_per_task(logits), [&](int64_t first, int64_t stop) {
    for (int64_t i = first; i < stop; ++i) {
      const scalar_t* row = all + i * size;
      largest[i] = row_largest(row, size) * scale;
      sums[i] = static_cast<float>(row_exp_sum(row, size, scale, largest[i]));
      picked[i] = targets[i] >= 0 && targets[i] < size ? value_of(row[targets[i]]) * scale : 0.0f;
    }
  });
}

template <typename scalar_t>
void slopes(Tensor& logits, const int64_t* targets, const float* normalisers, const float* logprobs, const float* grads,
            float scale) {
  auto* all = static_cast<scalar_t*>(logits.mutable_data_ptr());
  const int64_t size = logits.size(1);
  torch::stable::parallel_for(0, logits.size(0), rows_per_task(logits), [&](int64_t first, int64_t stop) {
    for (int64_t i = first; i < stop; ++i) {
      scalar_t* row = all + i * size;
      const float slope = grads[i] * scale;
      row_slopes(row, size, scale, normalisers[i], -slope);
      if (targets[i] >= 0 && targets[i] < size) assign(row + targets[i], -slope * std::expm1(logprobs[i]));
    }
  });
}

std::tuple<Tensor, Tensor, Tensor> logit_stats_cpu(const Tensor& logits, const Tensor& targets, double scale) {
  check_logits("logit_stats", logits, targets);
  const Tensor wanted = torch::stable::contiguous(targets);
  Tensor largest = empty_per_row(targets), sums = empty_per_row(targets), picked = empty_per_row(targets);
  const auto run = logits.scalar_type() == ScalarType::Float ? stats<float> : stats<BFloat16>;
  STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float || logits.scalar_type() == ScalarType::BFloat16,
                  "logit_stats: logits must be float32 or bfloat16");
  run(logits, wanted.const_data_ptr<int64_t>(), static_cast<float>(scale), largest.mutable_data_ptr<float>(),
      sums.mutable_data_ptr<float>(), picked.mutable_data_ptr<float>());
  return {largest, sums, picked};
}

void logit_slopes_cpu(Tensor logits, const Tensor& targets, const Tensor& normalisers, const Tensor& logprobs,
                      const Tensor& grads, double scale) {
  check_logits("logit_slopes_", logits, targets);
  for (const Tensor* given : {&normalisers, &logprobs, &grads}) check_per_row("logit_slopes_", *given, targets);
  STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float || logits.scalar_type() == ScalarType::BFloat16,
                  "logit_slopes_: logits must be float32 or bfloat16");
  const Tensor wanted = torch::stable::contiguous(targets), shifts = torch::stable::contiguous(normalisers),
               chosen = torch::stable::contiguous(logprobs), weights = torch::stable::contiguous(grads);
  const auto run = logits.scalar_type() == ScalarType::Float ? slopes<float> : slopes<BFloat16>;
  run(logits, wanted.const_data_ptr<int64_t>(), shifts.const_data_ptr<float>(), chosen.const_data_ptr<float>(),
      weights.const_data_ptr<float>(), static_cast<float>(scale));
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_FRAGMENT(realhf, library) {
  library.def(
      "logit_stats(Tensor logits, Tensor targets, float scale) -> (Tensor largest, Tensor exp_sums, Tensor picked)");
  library.def(
      "logit_slopes_(Tensor(a!) logits, Tensor targets, Tensor normalisers, Tensor logprobs, Tensor grads,"
      " float scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(realhf, CPU, library) {
  library.impl("logit_stats", TORCH_BOX(&realhf::logit_stats_cpu));
  library.impl("logit_slopes_", TORCH_BOX(&realhf::logit_slopes_cpu));
}
