// Helpers to launch CUDA kernels on the caller's device and stream, with error checks.
#pragma once

#include <cuda_runtime.h>
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
    return static_cast<cudaStream_t>(torch::stable::accelerator::getCurrentStream(device_).nativeHandle());
  }

  void check(const char* name) const {
    const cudaError_t error = cudaGetLastError();
    STD_TORCH_CHECK(error == cudaSuccess, name, ": ", cudaGetErrorString(error));
  }

 private:
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
};

inline unsigned blocks_for(int64_t work, int64_t per_block) {
  return static_cast<unsigned>((work + per_block - 1) / per_block);
}

}  // namespace realhf
