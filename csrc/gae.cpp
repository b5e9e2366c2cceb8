// Generalised advantage estimation over packed rows (arXiv 1506.02438, eq. 16): operator schema and CPU kernel.
// realhf/ops/gae.py documents the operator, scan.h the scan.
#include "gae.h"

#include <algorithm>
#include <tuple>

#include "scan.h"

namespace realhf {
namespace {

constexpr int64_t kTokensPerTask = 1 << 14;

// One vector of tokens; the carry is the advantage of the following token.
template <typename scalar_t, typename R = Register<scalar_t>>
REALHF_INLINE void some_tokens(const scalar_t* rewards, const typename R::Steps& after, const scalar_t* values_before,
                               const Decay<scalar_t>& decay, double& carry, scalar_t* advantages, scalar_t* returns) {
  const typename R::Steps before = R::load(values_before);
  typename R::Steps sum = deltas(R::load(rewards), after, before, decay);
  scan_steps(sum, ~typename R::Marks{}, decay, carry);
  R::store(advantages, sum);
  R::store(returns, sum + before);
}

template <typename scalar_t>
REALHF_SIMD_CLONES void row_gae(const scalar_t* rewards, const scalar_t* values, int64_t length, bool bootstrap,
                                const Decay<scalar_t>& given, scalar_t* advantages, scalar_t* returns) {
  using R = Register<scalar_t>;
  const Decay<scalar_t> decay = given;  // a local copy, which cannot alias the outputs
  double carry = 0.0;
  int64_t left = length - 1;
  advantages[0] = returns[0] = 0;
  if (left < R::kSteps) {
    for (double after = bootstrap ? values[left] : 0.0; left > 0; --left) {
      const double before = values[left - 1];
      carry = rewards[left] + decay.gamma * after - before + decay.once * carry;
      advantages[left] = static_cast<scalar_t>(carry);
      returns[left] = static_cast<scalar_t>(carry + before);
      after = before;
    }
    return;
  }
  int64_t at = left - R::kSteps + 1;
  typename R::Steps after = R::load(values + at);
  if (!bootstrap) after[R::kSteps - 1] = 0;
  some_tokens(rewards + at, after, values + at - 1, decay, carry, advantages + at, returns + at);
  left = (left - 1) / R::kSteps * R::kSteps;  // whole vectors remain; the overlap is computed twice
  carry = advantages[left + 1];
  for (; left > 0; left -= R::kSteps) {
    at = left - R::kSteps + 1;
    some_tokens(rewards + at, R::load(values + at), values + at - 1, decay, carry, advantages + at, returns + at);
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
  const Decay<scalar_t> decay(gamma, lam);
  // Tasks are ranges of tokens, for balance; a row belongs to the task in which it starts.
  torch::stable::parallel_for(0, n_tokens, kTokensPerTask, [&](int64_t first, int64_t stop) {
    int64_t row = std::lower_bound(starts, starts + n_rows, stop) - starts;
    while (--row >= 0 && starts[row] >= first) {  // backwards, as within a row, for the prefetcher
      const int64_t at = starts[row], length = starts[row + 1] - at;
      row_gae(rewards + at, values + at, length, bootstrap[row], decay, advantages_out + at, returns_out + at);
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
