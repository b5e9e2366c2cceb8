// Generalised advantage estimation over slots with consecutive sequences: operator schema and CPU kernel.
// realhf/ops/gae.py documents the operators, scan.h the scan.
#include "gae_2d.h"

#include <algorithm>
#include <tuple>

#include "scan.h"

namespace realhf {
namespace {

constexpr int64_t kStepsPerTask = 1 << 14;

// One vector of steps; the carry is the advantage of the following step.
template <typename scalar_t, typename R = Register<scalar_t>>
REALHF_INLINE void some_steps(const scalar_t* rewards, const scalar_t* values, const bool* ends_after,
                              const bool* truncates_after, const Decay<scalar_t>& decay, bool overlap, double& carry,
                              scalar_t* advantages, scalar_t* returns) {
  const typename R::Steps before = R::load(values);
  const typename R::Marks is_linked = R::load_falsehood(ends_after), uncut = R::load_falsehood(truncates_after);
  typename R::Steps sum = deltas(R::load(rewards), R::where(is_linked, R::load(values + 1)), before, decay);
  if (overlap) sum = R::where(uncut, sum);
  scan_steps(sum, is_linked & uncut, decay, carry);
  R::store(advantages, sum);
  R::store(returns, sum + before);
}

template <typename scalar_t>
REALHF_SIMD_CLONES void slot_gae(const scalar_t* rewards, const scalar_t* values, const bool* ends,
                                 const bool* truncates, int64_t n_steps, const Decay<scalar_t>& given, bool overlap,
                                 scalar_t* advantages, scalar_t* returns) {
  using R = Register<scalar_t>;
  const Decay<scalar_t> decay = given;  // a local copy, which cannot alias the outputs
  double carry = 0.0;
  int64_t left = n_steps;
  if (left < R::kSteps) {
    while (--left >= 0) {
      const bool end = ends[left + 1], cut = truncates[left + 1];
      const double delta = rewards[left] + (end ? 0.0 : decay.gamma * values[left + 1]) - values[left];
      carry = (overlap && cut ? 0.0 : delta) + (end || cut ? 0.0 : decay.once * carry);
      advantages[left] = static_cast<scalar_t>(carry);
      returns[left] = static_cast<scalar_t>(carry + values[left]);
    }
    return;
  }
  const auto steps_from = [&](int64_t at) __attribute__((always_inline)) {
    some_steps(rewards + at, values + at, ends + at + 1, truncates + at + 1, decay, overlap, carry, advantages + at,
               returns + at);
  };
  steps_from(left - R::kSteps);
  left = (left - 1) / R::kSteps * R::kSteps;  // whole vectors remain; the overlap is computed twice
  carry = advantages[left];
  for (; left > 0; left -= R::kSteps) steps_from(left - R::kSteps);
}

template <typename scalar_t>
void slots_gae(const Slots& slots, double gamma, double lam, bool overlap, Tensor& advantages, Tensor& returns) {
  const scalar_t* rewards = slots.rewards.const_data_ptr<scalar_t>();
  const scalar_t* values = slots.values.const_data_ptr<scalar_t>();
  const bool* ends = slots.ends.const_data_ptr<bool>();
  const bool* truncates = slots.truncates.const_data_ptr<bool>();
  scalar_t* advantages_out = advantages.mutable_data_ptr<scalar_t>();
  scalar_t* returns_out = returns.mutable_data_ptr<scalar_t>();
  const Decay<scalar_t> decay(gamma, lam);
  const int64_t n_steps = slots.n_steps, grain = kStepsPerTask / (n_steps + 1) + 1;
  torch::stable::parallel_for(0, slots.n_slots, grain, [&](int64_t first, int64_t stop) {
    for (int64_t slot = stop - 1; slot >= first; --slot) {  // backwards, as within a slot, for the prefetcher
      const int64_t at = slot * n_steps, at_longer = slot * (n_steps + 1);
      slot_gae(rewards + at, values + at_longer, ends + at_longer, truncates + at_longer, n_steps, decay, overlap,
               advantages_out + at, returns_out + at);
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
