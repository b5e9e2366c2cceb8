// Elements of CUDA kernels: conversions to and from float, and packs that a thread loads in one instruction.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace realhf {

__device__ inline float value_of(float x) { return x; }
__device__ inline float value_of(__half x) { return __half2float(x); }
__device__ inline float value_of(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void assign(float& to, float value) { to = value; }
__device__ inline void assign(__half& to, float value) { to = __float2half(value); }
__device__ inline void assign(__nv_bfloat16& to, float value) { to = __float2bfloat16(value); }

// Calls `run` with a null pointer of the element type.
template <typename Run>
void for_type(const char* name, const torch::stable::Tensor& tensor, const Run& run) {
  switch (tensor.scalar_type()) {
    case torch::headeronly::ScalarType::Float:
      return run(static_cast<float*>(nullptr));
    case torch::headeronly::ScalarType::Half:
      return run(static_cast<__half*>(nullptr));
    case torch::headeronly::ScalarType::BFloat16:
      return run(static_cast<__nv_bfloat16*>(nullptr));
    default:
      STD_TORCH_CHECK(false, name, ": elements must be float32, float16 or bfloat16");
  }
}

constexpr int64_t kPackBytes = 16;

template <typename scalar_t, int count>
struct alignas(sizeof(scalar_t) * count) Pack {
  static constexpr int kCount = count;
  scalar_t at[count];
};

// Calls `run` with a null pointer of the largest pack into which all of `sizes`, counts of elements, and the addresses
// can be divided: 16 bytes or one element.
template <typename scalar_t, typename Run>
void for_pack(std::initializer_list<const void*> addresses, std::initializer_list<int64_t> sizes, const Run& run) {
  constexpr int64_t kCount = kPackBytes / sizeof(scalar_t);
  bool fits = true;
  for (const void* address : addresses) fits = fits && reinterpret_cast<uintptr_t>(address) % kPackBytes == 0;
  for (const int64_t size : sizes) fits = fits && size % kCount == 0;
  if (fits) {
    run(static_cast<Pack<scalar_t, kCount>*>(nullptr));
  } else {
    run(static_cast<Pack<scalar_t, 1>*>(nullptr));
  }
}

}  // namespace realhf
