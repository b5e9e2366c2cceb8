// Kernels that break one rule of CUDA each, and one that breaks none: the tests run them to see that they are refused.
#include <cuda_runtime.h>

#include <exception>
#include <string>

namespace {

enum Rule {
  kNone,
  kHalfOfTheMask,
  kTwoShuffles,
  kTwoMasks,
  kNotInItsMask,
  kReadsOutsideTheMask,
  kTwoBarriers,
  kExitsBeforeBarrier,
  kSharedIndex,
  kDynamicIndex,
  kTooMuchShared,
  kEndless,
  kEmptyGrid,
  kLargeGrid,
  kLargeBlock,
  kTooMuchDynamic,
  kDefaultStream,
};

constexpr int kThreads = 64;
constexpr unsigned kAll = ~0u, kLower = 0xffffu;

__device__ void fill_shared(float* out) {
  __shared__ float most[12 << 10];
  __shared__ float more[1 << 8];
  most[0] = more[0] = 1.0f;
  out[0] = most[0] + more[0];
}

__global__ void break_rule(int rule, float* out) {
  __shared__ float parts[kThreads];
  extern __shared__ float rest[];
  const int at = threadIdx.x, lane = at % 32;
  parts[at] = 1.0f;
  __syncthreads();
  float sum = parts[kThreads - 1 - at];
  for (int span = 16; span > 0; span /= 2) sum += __shfl_xor_sync(kAll, sum, span);
  switch (rule) {
    case kHalfOfTheMask:
      if (lane < 16) sum += __shfl_sync(kAll, sum, 0);
      break;
    case kTwoShuffles:
      sum += lane < 16 ? __shfl_sync(kAll, sum, 0) : __shfl_sync(kAll, sum, 1);
      break;
    case kTwoMasks:
      sum += __shfl_sync(lane < 16 ? kLower | 1u << 16 : kAll, sum, 0);
      break;
    case kNotInItsMask:
      sum += __shfl_sync(kLower, sum, 0);
      break;
    case kReadsOutsideTheMask:
      if (lane < 16) sum += __shfl_sync(kLower, sum, 16);
      break;
    case kTwoBarriers:
      if (at < 32) {
        __syncthreads();
      } else {
        __syncthreads();
      }
      break;
    case kExitsBeforeBarrier:
      if (at == 3) return;
      __syncthreads();
      break;
    case kSharedIndex:
      parts[at + 1] = sum;
      break;
    case kDynamicIndex:
      rest[at] = sum;
      break;
    case kTooMuchShared:
      fill_shared(out);
      break;
    case kEndless:
      while (__any_sync(kAll, sum > 0)) sum += 1.0f;
      break;
    default:
      break;
  }
  out[at] = sum;
}

}  // namespace

// Runs a kernel that breaks a rule; returns the error message, or an empty string.
extern "C" __attribute__((visibility("default"))) const char* emulated_break_rule(int rule, void* stream) {
  static std::string text;
  float out[kThreads];
  const dim3 blocks = rule == kEmptyGrid ? dim3(0) : rule == kLargeGrid ? dim3(1, 1 << 16) : dim3(1);
  const unsigned threads = rule == kLargeBlock ? 1025 : kThreads;
  const size_t bytes = rule == kTooMuchDynamic ? (48 << 10) + 1 : 16;
  emulated::set_max_waits(1000);
  try {
    break_rule<<<blocks, threads, bytes, rule == kDefaultStream ? nullptr : stream>>>(rule, out);
    text = cudaGetErrorString(cudaGetLastError());
  } catch (const std::exception& error) {
    text = error.what();
  }
  emulated::set_max_waits(1 << 20);
  return text.c_str();
}
