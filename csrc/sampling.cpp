// Token sampling: operator schemas and CPU kernels. realhf/ops/sampling.py documents the operators.
#include "sampling.h"

#include <tuple>

#include "sampling_row.h"

namespace realhf {
namespace {

constexpr int64_t kElementsPerTask = 1 << 14;

std::tuple<Tensor, Tensor, Tensor> sample_tokens_cpu(const Tensor& logits, const Tensor& u,
                                                     const std::optional<Tensor>& forbid,
                                                     const std::optional<Tensor>& forbid_rows, double temperature,
                                                     int64_t top_k, double top_p) {
  const Drawing drawing = checked_drawing(logits, u, forbid, forbid_rows, temperature, top_k, top_p);
  for (int64_t i = 0; i < drawing.n_forbidden(); ++i) {
    STD_TORCH_CHECK(drawing.forbidden()[i] >= 0 && drawing.forbidden()[i] < drawing.vocab, "sample_tokens: token ",
                    drawing.forbidden()[i], " is forbidden, but the vocabulary has ", drawing.vocab);
  }
  Drawn drawn = empty_drawn(drawing);
  const float* all = drawing.logits.const_data_ptr<float>();
  const double* us = drawing.u.const_data_ptr<double>();
  int64_t* tokens = drawn.tokens.mutable_data_ptr<int64_t>();
  float* logprobs = drawn.logprobs.mutable_data_ptr<float>();
  float* sampling_logprobs = drawn.sampling_logprobs.mutable_data_ptr<float>();
  const DrawRule rule{drawing.temperature, drawing.top_k, drawing.top_p, drawing.forbidden(), drawing.n_forbidden()};
  const int64_t grain = kElementsPerTask / drawing.vocab + 1;
  torch::stable::parallel_for(0, drawing.n_rows, grain, [&](int64_t first, int64_t stop) {
    Row row(drawing.vocab);
    for (int64_t i = first; i < stop; ++i) {
      const bool is_restricted = drawing.rows() == nullptr || drawing.rows()[i];
      const Sampled sampled = row.draw(all + i * drawing.vocab, rule, is_restricted, us[i]);
      tokens[i] = sampled.token, logprobs[i] = sampled.logprob, sampling_logprobs[i] = sampled.sampling_logprob;
    }
  });
  return {drawn.tokens, drawn.logprobs, drawn.sampling_logprobs};
}

Tensor counter_uniform_cpu(int64_t seed, const Tensor& prompts, const Tensor& samples, const Tensor& positions) {
  const Counters counters = checked_counters(prompts, samples, positions);
  Tensor result = torch::stable::new_empty(prompts, {prompts.numel()}, ScalarType::Double);
  const int64_t* prompt = counters.prompts.const_data_ptr<int64_t>();
  const int64_t* sample = counters.samples.const_data_ptr<int64_t>();
  const int64_t* position = counters.positions.const_data_ptr<int64_t>();
  double* out = result.mutable_data_ptr<double>();
  torch::stable::parallel_for(0, prompts.numel(), kElementsPerTask, [&](int64_t first, int64_t stop) {
    for (int64_t i = first; i < stop; ++i) out[i] = uniform_of(seed, prompt[i], sample[i], position[i]);
  });
  return result;
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_FRAGMENT(realhf, library) {
  library.def(
      "sample_tokens(Tensor logits, Tensor u, Tensor? forbid, Tensor? forbid_rows, float temperature, int top_k,"
      " float top_p) -> (Tensor tokens, Tensor logprobs, Tensor sampling_logprobs)");
  library.def("counter_uniform(int seed, Tensor prompts, Tensor samples, Tensor positions) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(realhf, CPU, library) {
  library.impl("sample_tokens", TORCH_BOX(&realhf::sample_tokens_cpu));
  library.impl("counter_uniform", TORCH_BOX(&realhf::counter_uniform_cpu));
}
