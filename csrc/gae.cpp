// Generalised advantage estimation over packed rows (arXiv 1506.02438, eq. 16): the schema, and the kernel for CPUs.
// realhf/ops/gae.py says what is computed. Sums are kept in double and rounded once.
#include "gae.h"

#include <algorithm>
#include <tuple>

#include "scan.h"

namespace realhf {
namespace {

constexpr int64_t kTokensPerTask = 1 << 14;

// Eight tokens, of which the last is followed by those whose advantages the carry sums up.
template <typename scalar_t>
REALHF_INLINE void eight_tokens(const scalar_t* rewards, const scalar_t* values, const scalar_t* values_before,
                                double gamma, const Decay& decay, double& carry, scalar_t* advantages,
                                scalar_t* returns) {
  const Doubles before = load_steps(values_before);
  Doubles sum = load_steps(rewards) + gamma * load_steps(values) - before;
  scan_steps(sum, decay);
  sum += decay.reach * carry;
  carry = sum[0];
  store_steps(advantages, sum);
  store_steps(returns, sum + before);
}

template <typename scalar_t>
REALHF_SIMD_CLONES void row_gae(const scalar_t* rewards, const scalar_t* values, int64_t length, bool bootstrap,
                                double gamma, const Decay& decay, scalar_t* advantages, scalar_t* returns) {
  advantages[0] = returns[0] = 0;
  int64_t t = length - 1;  // the first token whose advantage is known
  if (t == 0) return;
  double carry = (bootstrap ? rewards[t] + gamma * values[t] : rewards[t]) - values[t - 1];
  advantages[t] = static_cast<scalar_t>(carry);
  returns[t] = static_cast<scalar_t>(carry + values[t - 1]);
  for (; t > kSteps; t -= kSteps) {
    const int64_t at = t - kSteps;
    eight_tokens(rewards + at, values + at, values + at - 1, gamma, decay, carry, advantages + at, returns + at);
  }
  const int64_t left = t - 1;
  scalar_t padded[5][kSteps];
  pad_steps(rewards + 1, left, padded[0]);
  pad_steps(values + 1, left, padded[1]);
  pad_steps(values, left, padded[2]);
  eight_tokens(padded[0], padded[1], padded[2], gamma, decay, carry, padded[3], padded[4]);
  std::copy(padded[3] + kSteps - left, padded[3] + kSteps, advantages + 1);
  std::copy(padded[4] + kSteps - left, padded[4] + kSteps, returns + 1);
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
  const Decay decay = powers_of(gamma * lam);
  // Work is cut by tokens, for balance; a row belongs to the piece in which it starts.
  torch::stable::parallel_for(0, n_tokens, kTokensPerTask, [&](int64_t first, int64_t stop) {
    int64_t row = std::lower_bound(starts, starts + n_rows, first) - starts;
    for (; row < n_rows && starts[row] < stop; ++row) {
      const int64_t at = starts[row], length = starts[row + 1] - at;
      row_gae(rewards + at, values + at, length, bootstrap[row], gamma, decay, advantages_out + at, returns_out + at);
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
