// Reductions over the threads of a warp and of a block of CUDA threads, in a fixed order.
#pragma once

#include "device.h"

namespace realhf {

// Every lane gets the result. All lanes of the warp call it.
template <int n_lanes = kWarp, typename Value, typename Combine>
__device__ Value over_warp(Value value, Combine combine) {
  for (int span = n_lanes / 2; span > 0; span /= 2) value = combine(value, __shfl_xor_sync(kWholeWarp, value, span));
  return value;
}

// Every thread gets the result. All threads of a block of n_threads call it.
template <int n_threads, typename Value, typename Combine>
__device__ Value over_block(Value value, Combine combine) {
  constexpr int kWarps = n_threads / kWarp;
  static_assert(kWarps <= kWarp && (kWarps & (kWarps - 1)) == 0, "the first reduction leaves one value per lane");
  __shared__ Value parts[kWarps];
  value = over_warp(value, combine);
  __syncthreads();  // wait for readers of the previous reduction
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = value;
  __syncthreads();
  return over_warp<kWarps>(parts[threadIdx.x % kWarps], combine);
}

}  // namespace realhf
