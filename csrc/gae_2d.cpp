// Generalised advantage estimation over slots that hold one sequence after the other: the schema, and the kernel for
// CPUs. realhf/ops/gae.py says what is computed. Sums are kept in double and rounded once.
#include "gae_2d.h"

#include <algorithm>
#include <tuple>

#include "scan.h"

namespace realhf {
namespace {

constexpr int64_t kStepsPerTask = 1 << 14;

// Eight steps, of which the last is followed by those whose advantages the carry sums up.
template <typename scalar_t>
REALHF_INLINE void eight_steps(const scalar_t* rewards, const scalar_t* values, const scalar_t* values_after,
                               const bool* ends_after, const bool* truncates_after, double gamma, double decay,
                               bool overlap, double& carry, scalar_t* advantages, scalar_t* returns) {
  const Doubles before = load_steps(values);
  const Longs goes_on = load_falsehood(ends_after), uncut = load_falsehood(truncates_after);
  const Doubles delta = load_steps(rewards) + where(goes_on, gamma * load_steps(values_after)) - before;
  Doubles sum = overlap ? where(uncut, delta) : delta;
  Doubles link = where(goes_on & uncut, Doubles{} + decay);
  scan_steps(sum, link);
  sum += link * carry;
  carry = sum[0];
  store_steps(advantages, sum);
  store_steps(returns, sum + before);
}

template <typename scalar_t>
REALHF_SIMD_CLONES void slot_gae(const scalar_t* rewards, const scalar_t* values, const bool* ends,
                                 const bool* truncates, int64_t n_steps, double gamma, double decay, bool overlap,
                                 scalar_t* advantages, scalar_t* returns) {
  double carry = 0.0;
  int64_t left = n_steps;
  for (; left >= kSteps; left -= kSteps) {
    const int64_t at = left - kSteps;
    eight_steps(rewards + at, values + at, values + at + 1, ends + at + 1, truncates + at + 1, gamma, decay, overlap,
                carry, advantages + at, returns + at);
  }
  if (left == 0) return;
  scalar_t padded[5][kSteps];
  bool flags[2][kSteps];
  pad_steps(rewards, left, padded[0]);
  pad_steps(values, left, padded[1]);
  pad_steps(values + 1, left, padded[2]);
  pad_steps(ends + 1, left, flags[0]);
  pad_steps(truncates + 1, left, flags[1]);
  eight_steps(padded[0], padded[1], padded[2], flags[0], flags[1], gamma, decay, overlap, carry, padded[3], padded[4]);
  std::copy(padded[3] + kSteps - left, padded[3] + kSteps, advantages);
  std::copy(padded[4] + kSteps - left, padded[4] + kSteps, returns);
}

template <typename scalar_t>
void slots_gae(const Slots& slots, double gamma, double lam, bool overlap, Tensor& advantages, Tensor& returns) {
  const scalar_t* rewards = slots.rewards.const_data_ptr<scalar_t>();
  const scalar_t* values = slots.values.const_data_ptr<scalar_t>();
  const bool* ends = slots.ends.const_data_ptr<bool>();
  const bool* truncates = slots.truncates.const_data_ptr<bool>();
  scalar_t* advantages_out = advantages.mutable_data_ptr<scalar_t>();
  scalar_t* returns_out = returns.mutable_data_ptr<scalar_t>();
  const int64_t n_steps = slots.n_steps, grain = kStepsPerTask / (n_steps + 1) + 1;
  torch::stable::parallel_for(0, slots.n_slots, grain, [&](int64_t first, int64_t stop) {
    for (int64_t slot = first; slot < stop; ++slot) {
      const int64_t at = slot * n_steps, at_longer = slot * (n_steps + 1);
      slot_gae(rewards + at, values + at_longer, ends + at_longer, truncates + at_longer, n_steps, gamma, gamma * lam,
               overlap, advantages_out + at, returns_out + at);
    }
  });
}

std::tuple<Tensor, Tensor> gae_2d_cpu(const Tensor& rewards, const Tensor& values, const Tensor& ends,
                                      const Tensor& truncates, double gamma, double lam, bool overlap) {
  const Slots slots = checked_slots(rewards, values, ends, truncates);
  Tensor advantages = torch::stable::empty_like(slots.rewards);
  Tensor returns = torch::stable::empty_like(slots.rewards);
  if (values.scalar_type() == ScalarType::Float) {
    slots_gae<float>(slots, gamma, lam, overlap, advantages, returns);
  } else {
    slots_gae<double>(slots, gamma, lam, overlap, advantages, returns);
  }
  return {advantages, returns};
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_FRAGMENT(realhf, library) {
  library.def(
      "gae_2d(Tensor rewards, Tensor values, Tensor ends, Tensor truncates, float gamma, float lam, bool overlap)"
      " -> (Tensor advantages, Tensor returns)");
}

STABLE_TORCH_LIBRARY_IMPL(realhf, CPU, library) { library.impl("gae_2d", TORCH_BOX(&realhf::gae_2d_cpu)); }
