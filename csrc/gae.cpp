// Generalised advantage estimation over packed rows (arXiv 1506.02438, eq. 16): the schema, and the kernel for CPUs.
// realhf/ops/gae.py says what is computed. Sums are kept in double and rounded once.
#include "gae.h"

#include <algorithm>
#include <tuple>
#include <vector>

#include "simd.h"

namespace realhf {
namespace {

constexpr int64_t kTokensPerTask = 1 << 14;

// Three passes over one row, so that the first and the last fill wide registers. `sums` is scratch of `length`.
template <typename scalar_t>
REALHF_SIMD_CLONES void row_gae(const scalar_t* __restrict rewards, const scalar_t* __restrict values, int64_t length,
                                bool bootstrap, double gamma, double decay, double* __restrict sums,
                                scalar_t* __restrict advantages, scalar_t* __restrict returns) {
  const int64_t last = length - 1;
  for (int64_t t = 1; t <= last; ++t) sums[t] = rewards[t] + gamma * values[t] - values[t - 1];
  if (!bootstrap && last > 0) sums[last] = static_cast<double>(rewards[last]) - values[last - 1];

  // Four tokens a step: only the carry from step to step has to wait for the step before.
  const double decay2 = decay * decay, decay3 = decay2 * decay, decay4 = decay2 * decay2;
  double later = 0.0;
  int64_t t = last;
  for (; t >= 4; t -= 4) {
    const double sum0 = sums[t];
    const double sum1 = sums[t - 1] + decay * sum0;
    const double sum2 = sums[t - 2] + decay * sum1;
    const double sum3 = sums[t - 3] + decay * sum2;
    sums[t] = sum0 + decay * later;
    sums[t - 1] = sum1 + decay2 * later;
    sums[t - 2] = sum2 + decay3 * later;
    sums[t - 3] = later = sum3 + decay4 * later;
  }
  for (; t >= 1; --t) sums[t] = later = sums[t] + decay * later;

  advantages[0] = returns[0] = 0;
  for (t = 1; t <= last; ++t) {
    advantages[t] = static_cast<scalar_t>(sums[t]);
    returns[t] = static_cast<scalar_t>(sums[t] + values[t - 1]);
  }
}

template <typename scalar_t>
void rows_gae(const PackedRows& rows, double gamma, double lam, Tensor& advantages, Tensor& returns) {
  const scalar_t* rewards = rows.rewards.const_data_ptr<scalar_t>();
  const scalar_t* values = rows.values.const_data_ptr<scalar_t>();
  const int64_t* starts = rows.starts.const_data_ptr<int64_t>();
  const bool* bootstrap = rows.bootstrap.const_data_ptr<bool>();
  scalar_t* advantages_out = advantages.mutable_data_ptr<scalar_t>();
  scalar_t* returns_out = returns.mutable_data_ptr<scalar_t>();
  const int64_t n_rows = rows.starts.numel() - 1;
  const int64_t n_tokens = rows.values.numel();
  // Work is cut by tokens, for balance; a row belongs to the piece in which it starts.
  torch::stable::parallel_for(0, n_tokens, kTokensPerTask, [&](int64_t first, int64_t stop) {
    std::vector<double> sums;
    int64_t row = std::lower_bound(starts, starts + n_rows, first) - starts;
    for (; row < n_rows && starts[row] < stop; ++row) {
      const int64_t at = starts[row], length = starts[row + 1] - at;
      if (static_cast<int64_t>(sums.size()) < length) sums.resize(length);
      row_gae(rewards + at, values + at, length, bootstrap[row], gamma, gamma * lam, sums.data(), advantages_out + at,
              returns_out + at);
    }
  });
}

std::tuple<Tensor, Tensor> packed_gae_cpu(const Tensor& rewards, const Tensor& values, const Tensor& cu_seqlens,
                                          const Tensor& bootstrap, double gamma, double lam) {
  const PackedRows rows = checked_rows(rewards, values, cu_seqlens, bootstrap);
  Tensor advantages = torch::stable::empty_like(rows.values);
  Tensor returns = torch::stable::empty_like(rows.values);
  if (values.scalar_type() == ScalarType::Float) {
    rows_gae<float>(rows, gamma, lam, advantages, returns);
  } else {
    rows_gae<double>(rows, gamma, lam, advantages, returns);
  }
  return {advantages, returns};
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_FRAGMENT(realhf, library) {
  library.def(
      "packed_gae(Tensor rewards, Tensor values, Tensor cu_seqlens, Tensor bootstrap, float gamma, float lam)"
      " -> (Tensor advantages, Tensor returns)");
}

STABLE_TORCH_LIBRARY_IMPL(realhf, CPU, library) { library.impl("packed_gae", TORCH_BOX(&realhf::packed_gae_cpu)); }
