// Helpers to launch CUDA kernels on the caller's device and stream, with error checks.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace realhf {

constexpr int kWarp = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;

// Makes the tensor's device current during its lifetime.
class Launch {
 public:
  explicit Launch(const torch::stable::Tensor& tensor) : device_(tensor.get_device_index()), guard_(device_) {}

  cudaStream_t stream() const {
#if TORCH_FEATURE_VERSION >= 0x020d000000000000  // 2.13; before, only a function of libtorch_cuda has the handle
    return static_cast<cudaStream_t>(torch::stable::accelerator::getCurrentStream(device_).nativeHandle());
#else
    void* stream = nullptr;
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream) == AOTI_TORCH_SUCCESS,
                    "no current stream on cuda:", device_);
    return static_cast<cudaStream_t>(stream);
#endif
  }

  void check(const char* name) const {
    const cudaError_t error = cudaGetLastError();
    STD_TORCH_CHECK(error == cudaSuccess, name, ": ", cudaGetErrorString(error));
  }

 private:
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
};

// The blocks of a one-dimensional grid, which has at most 2^31 - 1.
inline unsigned blocks_for(int64_t work, int64_t per_block) {
  const int64_t n_blocks = (work + per_block - 1) / per_block;
  STD_TORCH_CHECK(n_blocks < int64_t{1} << 31, work, " units of work need ", n_blocks, " blocks, more than a grid has");
  return static_cast<unsigned>(n_blocks);
}

}  // namespace realhf
