// Generalised advantage estimation over slots with consecutive sequences: CUDA kernel.
// realhf/ops/gae.py documents the operators, gae_2d.cpp has the schema. Sums are in double and rounded once.
#include <tuple>

#include "device.h"
#include "gae_2d.h"

namespace realhf {
namespace {

constexpr int kSlotsPerBlock = 4;

// One warp processes one slot from its end to its start, 32 steps at a time. Lane i has the i-th step from the end.
// A[t] = sum[t] + link[t] * A[t+1] is affine in A[t+1], so a prefix composition over lanes, by doubling, gives every
// step as a function of the carry of the previous 32.
template <typename scalar_t>
__global__ void slots_gae(const scalar_t* rewards, const scalar_t* values, const bool* ends, const bool* truncates,
                          int64_t n_slots, int64_t n_steps, double gamma, double decay, bool overlap,
                          scalar_t* advantages, scalar_t* returns) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kSlotsPerBlock + threadIdx.y;
  if (slot >= n_slots) return;
  const int lane = threadIdx.x;
  rewards += slot * n_steps, advantages += slot * n_steps, returns += slot * n_steps;
  values += slot * (n_steps + 1), ends += slot * (n_steps + 1), truncates += slot * (n_steps + 1);
  double carry = 0.0;
  for (int64_t stop = n_steps; stop > 0; stop -= kWarp) {
    const int64_t t = stop - 1 - lane;
    double sum = 0.0, link = 0.0;
    if (t >= 0) {
      const double after = ends[t + 1] ? 0.0 : gamma * values[t + 1];
      const double delta = rewards[t] + after - values[t];
      sum = overlap && truncates[t + 1] ? 0.0 : delta;
      link = ends[t + 1] || truncates[t + 1] ? 0.0 : decay;
    }
    for (int span = 1; span < kWarp; span *= 2) {  // invariant: a lane holds the composition of the next `span` steps
      const double later = __shfl_up_sync(kWholeWarp, sum, span);
      const double further = __shfl_up_sync(kWholeWarp, link, span);
      if (lane >= span && link != 0.0) {  // a NaN of another sequence times 0 would be a NaN
        sum += link * later;
        link *= further;
      }
    }
    if (link != 0.0) sum += link * carry;
    carry = __shfl_sync(kWholeWarp, sum, kWarp - 1);
    if (t >= 0) {
      advantages[t] = static_cast<scalar_t>(sum);
      returns[t] = static_cast<scalar_t>(sum + values[t]);
    }
  }
}

template <typename scalar_t>
void launch(const Slots& slots, double gamma, double lam, bool overlap, Tensor& advantages, Tensor& returns,
            cudaStream_t stream) {
  const dim3 threads(kWarp, kSlotsPerBlock);
  slots_gae<scalar_t><<<blocks_for(slots.n_slots, kSlotsPerBlock), threads, 0, stream>>>(
      slots.rewards.const_data_ptr<scalar_t>(), slots.values.const_data_ptr<scalar_t>(),
      slots.ends.const_data_ptr<bool>(), slots.truncates.const_data_ptr<bool>(), slots.n_slots, slots.n_steps, gamma,
      gamma * lam, overlap, advantages.mutable_data_ptr<scalar_t>(), returns.mutable_data_ptr<scalar_t>());
}

std::tuple<Tensor, Tensor> gae_2d_cuda(const Tensor& rewards, const Tensor& values, const Tensor& ends,
                                       const Tensor& truncates, double gamma, double lam, bool overlap) {
  const Slots slots = checked_slots(rewards, values, ends, truncates);
  Tensor advantages = torch::stable::empty_like(slots.rewards);
  Tensor returns = torch::stable::empty_like(slots.rewards);
  if (slots.rewards.numel() == 0) return {advantages, returns};
  const Launch on(slots.rewards);
  if (values.scalar_type() == ScalarType::Float) {
    launch<float>(slots, gamma, lam, overlap, advantages, returns, on.stream());
  } else {
    launch<double>(slots, gamma, lam, overlap, advantages, returns, on.stream());
  }
  on.check("gae_2d");
  return {advantages, returns};
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_IMPL(realhf, CUDA, library) { library.impl("gae_2d", TORCH_BOX(&realhf::gae_2d_cuda)); }
