// Generalised advantage estimation over packed rows (arXiv 1506.02438, eq. 16): CUDA kernel.
// realhf/ops/gae.py documents the operator, gae.cpp has the schema. Sums are in double and rounded once.
#include <tuple>

#include "device.h"
#include "gae.h"

namespace realhf {
namespace {

constexpr int kRowsPerBlock = 4;

// One warp processes one row from its end to its start, 32 tokens at a time. Lane i has the i-th token from the end,
// so A[t] = delta[t] + decay * A[t+1] is a prefix sum over lanes, by doubling, plus the carry of the previous 32.
template <typename scalar_t>
__global__ void rows_gae(const scalar_t* rewards, const scalar_t* values, const int64_t* starts, const bool* bootstrap,
                         int64_t n_rows, double gamma, double decay, scalar_t* advantages, scalar_t* returns) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.y;
  if (row >= n_rows) return;
  const int lane = threadIdx.x;
  const int64_t start = starts[row];
  const int64_t end = starts[row + 1];
  double reach = decay;  // decay to the power of this lane's distance from the carry
  for (int i = 0; i < lane; ++i) reach *= decay;
  double carry = 0.0;
  for (int64_t stop = end; stop > start; stop -= kWarp) {
    const int64_t t = stop - 1 - lane;
    const bool has_action = t > start;
    double before = 0.0;
    double sum = 0.0;
    if (has_action) {
      before = values[t - 1];
      const double after = t < end - 1 || bootstrap[row] ? values[t] : 0.0;
      sum = rewards[t] + gamma * after - before;
    }
    double weight = decay;
    for (int span = 1; span < kWarp; span *= 2) {  // invariant: a lane holds the sum of the next `span` deltas
      const double later = __shfl_up_sync(kWholeWarp, sum, span);
      if (lane >= span) sum += weight * later;
      weight *= weight;
    }
    sum += reach * carry;
    carry = __shfl_sync(kWholeWarp, sum, kWarp - 1);
    if (t >= start) {
      advantages[t] = static_cast<scalar_t>(has_action ? sum : 0.0);
      returns[t] = static_cast<scalar_t>(has_action ? sum + before : 0.0);
    }
  }
}

template <typename scalar_t>
void launch(const PackedRows& rows, const Tensor& starts, double gamma, double lam, Tensor& advantages, Tensor& returns,
            cudaStream_t stream) {
  const int64_t n_rows = starts.numel() - 1;
  const dim3 threads(kWarp, kRowsPerBlock);
  rows_gae<scalar_t><<<blocks_for(n_rows, kRowsPerBlock), threads, 0, stream>>>(
      rows.rewards.const_data_ptr<scalar_t>(), rows.values.const_data_ptr<scalar_t>(), starts.const_data_ptr<int64_t>(),
      rows.bootstrap.const_data_ptr<bool>(), n_rows, gamma, gamma * lam, advantages.mutable_data_ptr<scalar_t>(),
      returns.mutable_data_ptr<scalar_t>());
}

std::tuple<Tensor, Tensor> packed_gae_cuda(const Tensor& rewards, const Tensor& values, const Tensor& cu_seqlens,
                                           const Tensor& bootstrap, double gamma, double lam) {
  const PackedRows rows = checked_rows(rewards, values, cu_seqlens, bootstrap);
  Tensor advantages = torch::stable::empty_like(rows.values);
  Tensor returns = torch::stable::empty_like(rows.values);
  if (rows.bootstrap.numel() == 0) return {advantages, returns};
  const Launch on(rows.values);
  const Tensor starts =
      torch::stable::to(rows.starts, std::nullopt, std::nullopt, rows.values.device(), std::nullopt, true);
  if (values.scalar_type() == ScalarType::Float) {
    launch<float>(rows, starts, gamma, lam, advantages, returns, on.stream());
  } else {
    launch<double>(rows, starts, gamma, lam, advantages, returns, on.stream());
  }
  on.check("packed_gae");
  return {advantages, returns};
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_IMPL(realhf, CUDA, library) { library.impl("packed_gae", TORCH_BOX(&realhf::packed_gae_cuda)); }
