// One decoding step of the gated delta rule (arXiv 2412.06464, equation 10): operator schema and CPU kernel.
// realhf/ops/delta/gated_delta_rule.py documents the rule, realhf/models/attention/delta_mixer.py the whole step. Threads
// divide the rows and compute in float32 for every weight type.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "activations.h"
#include "arena.h"
#include "rope.h"

namespace realhf {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr float kNormEps = 1e-6f;          // of the norms of queries and keys
constexpr int64_t kElementsPerTask = 1 << 14;  // of the states
constexpr int64_t kMaxWidth = 1 << 24;     // of sizes, whose products must not overflow

struct DeltaShape {
  int64_t n_keys, n_values, key_dim, value_dim, taps;
  float eps;

  int64_t keys() const { return n_keys * key_dim; }
  int64_t values() const { return n_values * value_dim; }
  int64_t channels() const { return 2 * keys() + values(); }  // of the convolution
  int64_t width() const { return channels() + values() + 2 * n_values; }
  int64_t state() const { return values() * key_dim; }
};

template <typename scalar_t>
struct DeltaStep {
  const scalar_t *projected, *a_log, *dt_bias, *norm;
  const float* conv;  // [taps, channels]
  scalar_t *tails, *result;
  float* states;
};

#define REALHF_KERNEL_FILE "delta_rows.h"
#include "multi_isa.h"

template <typename scalar_t>
void run(const DeltaShape& shape, const Tensor& projected, const Tensor& conv, const Tensor& a_log,
         const Tensor& dt_bias, const Tensor& norm, Tensor& tails, Tensor& states, Tensor& result) {
  const auto of = [](const Tensor& given) { return static_cast<const scalar_t*>(given.const_data_ptr()); };
  const int64_t channels = shape.channels(), rows = projected.size(0);
  std::unique_ptr<float[]> by_tap(new float[shape.taps * channels]);
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t t = 0; t < shape.taps; ++t) by_tap[t * channels + c] = as_float(of(conv)[c * shape.taps + t]);
  }
  const DeltaStep<scalar_t> step{of(projected),
                                 of(a_log),
                                 of(dt_bias),
                                 of(norm),
                                 by_tap.get(),
                                 static_cast<scalar_t*>(tails.mutable_data_ptr()),
                                 static_cast<scalar_t*>(result.mutable_data_ptr()),
                                 states.mutable_data_ptr<float>()};
  using Work = void (*)(const DeltaShape&, const DeltaStep<scalar_t>&, int64_t, float*, float*);
  const auto work = best_isa<Work>(REALHF_ALL_ISAS(step_row));
  torch::stable::parallel_for(0, rows, kElementsPerTask / shape.state() + 1, [&](int64_t first, int64_t stop) {
    float *mixed = nullptr, *outputs = nullptr;
    const auto memory =
        aligned_buffers([&](const auto& take) { mixed = take(channels), outputs = take(shape.values()); });
    for (int64_t row = first; row < stop; ++row) work(shape, step, row, mixed, outputs);
  });
}

DeltaShape checked_delta(const Tensor& projected, const Tensor& conv, const Tensor& a_log, const Tensor& dt_bias,
                         const Tensor& norm, const Tensor& tails, const Tensor& states, double eps) {
  STD_TORCH_CHECK(states.dim() == 4 && states.is_contiguous() && states.scalar_type() == ScalarType::Float,
                  "delta_step: states must be [S, Hv, dk, dv] float32, contiguous");
  DeltaShape shape{0, states.size(1), states.size(2), states.size(3), 0, static_cast<float>(eps)};
  STD_TORCH_CHECK(shape.n_values > 0 && shape.key_dim > 0 && shape.value_dim > 0 && shape.n_values <= kMaxWidth &&
                      shape.key_dim <= kMaxWidth && shape.value_dim <= kMaxWidth && shape.key_dim % kLanes == 0 &&
                      shape.value_dim % kLanes == 0,
                  "delta_step: dk and dv must be multiples of ", kLanes);
  STD_TORCH_CHECK(conv.dim() == 3 && conv.size(1) == 1 && conv.size(2) > 0 && conv.is_contiguous() &&
                      conv.size(0) <= kMaxWidth && conv.size(0) > shape.values() &&
                      (conv.size(0) - shape.values()) % (2 * shape.key_dim) == 0,
                  "delta_step: conv must be [2 * Hk * dk + Hv * dv, 1, kernel], contiguous");
  shape.n_keys = (conv.size(0) - shape.values()) / (2 * shape.key_dim), shape.taps = conv.size(2);
  STD_TORCH_CHECK(shape.n_values % shape.n_keys == 0, "delta_step: ", shape.n_values, " heads over ", shape.n_keys);
  const int64_t rows = states.size(0);
  STD_TORCH_CHECK(projected.dim() == 2 && projected.size(0) == rows && projected.size(1) == shape.width() &&
                      projected.is_contiguous(),
                  "delta_step: projected must be [", rows, ", ", shape.width(), "], contiguous");
  STD_TORCH_CHECK(tails.dim() == 3 && tails.size(0) == rows && tails.size(1) == shape.taps - 1 &&
                      tails.size(2) == conv.size(0) && tails.is_contiguous(),
                  "delta_step: tails must be [", rows, ", ", shape.taps - 1, ", ", conv.size(0), "], contiguous");
  for (const Tensor* of_heads : {&a_log, &dt_bias}) {
    STD_TORCH_CHECK(of_heads->dim() == 1 && of_heads->size(0) == shape.n_values && of_heads->is_contiguous(),
                    "delta_step: a_log and dt_bias must be [", shape.n_values, "], contiguous");
  }
  STD_TORCH_CHECK(norm.dim() == 1 && norm.size(0) == shape.value_dim && norm.is_contiguous(),
                  "delta_step: norm must be [", shape.value_dim, "], contiguous");
  STD_TORCH_CHECK(projected.scalar_type() == ScalarType::Float || projected.scalar_type() == ScalarType::BFloat16,
                  "delta_step: projected must be float32 or bfloat16");
  for (const Tensor* given : {&conv, &a_log, &dt_bias, &norm, &tails}) {
    STD_TORCH_CHECK(given->scalar_type() == projected.scalar_type(), "delta_step: all but states must be alike");
  }
  return shape;
}

Tensor delta_step_cpu(const Tensor& projected, const Tensor& conv, const Tensor& a_log, const Tensor& dt_bias,
                      const Tensor& norm, Tensor tails, Tensor states, double eps) {
  const DeltaShape shape = checked_delta(projected, conv, a_log, dt_bias, norm, tails, states, eps);
  Tensor result = torch::stable::new_empty(projected, {projected.size(0), shape.values()});
  if (projected.size(0) == 0) return result;
  const auto all = projected.scalar_type() == ScalarType::Float ? run<float> : run<BFloat16>;
  all(shape, projected, conv, a_log, dt_bias, norm, tails, states, result);
  return result;
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_FRAGMENT(realhf, library) {
  library.def(
      "delta_step(Tensor projected, Tensor conv, Tensor a_log, Tensor dt_bias, Tensor norm, Tensor(a!) tails,"
      " Tensor(b!) states, float eps) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(realhf, CPU, library) { library.impl("delta_step", TORCH_BOX(&realhf::delta_step_cpu)); }
