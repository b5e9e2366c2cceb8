// What the kernels of csrc use of CUDA, for the emulation. A missing name is a compile error: add it here.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>

#include "runtime.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace emulated {

// Checks the bounds and the total size of an array in shared memory. Every block has a new, uninitialised one.
template <typename T, size_t count>
class SharedArray {
 public:
  template <typename Index>
  T& operator[](Index index) {
    const auto at = static_cast<int64_t>(index);
    T* all = data();
    if (at < 0 || at >= static_cast<int64_t>(n_bytes_ / sizeof(T))) {
      fail_thread("index " + std::to_string(at) + " of a shared array of " + std::to_string(n_bytes_ / sizeof(T)));
    }
    return all[at];
  }

  operator T*() { return data(); }

 private:
  __attribute__((no_sanitize("thread"))) T* data() {  // threads of a block compute the same place
    if (owner_ != block_number()) {
      place_ = reinterpret_cast<T*>(shared_memory(count * sizeof(T), n_bytes_));
      owner_ = block_number();
    }
    return place_;
  }

  T* place_ = nullptr;
  size_t n_bytes_ = 0;
  uint64_t owner_ = 0;
};

template <typename T>
using DynamicShared = SharedArray<T, 0>;

class Launcher {
 public:
  Launcher(const char* kernel, dim3 grid, dim3 block, size_t dynamic_bytes = 0, void* stream = nullptr)
      : configuration_{kernel, grid, block, dynamic_bytes, stream} {}

  template <typename Argument>
  void check(const Argument& argument) const {
    if constexpr (std::is_pointer_v<Argument>) check_device_pointer(configuration_.kernel, argument);
  }

  template <typename Kernel, typename... Arguments>
  void operator()(const Kernel& kernel, Arguments... arguments) const {
    (check(arguments), ...);
    run(configuration_, [&] { kernel(arguments...); });
  }

 private:
  Configuration configuration_;
};

template <typename T>
uint64_t to_word(T value) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(uint64_t));
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  return word;
}

template <typename T>
T from_word(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// The value of another lane; a source outside of the segment of `width` lanes is this lane itself.
template <typename T>
T shuffled(unsigned mask, T value, int source, int first, int width, const char* operation, Site site) {
  if (width <= 0 || width > static_cast<int>(kLanes) || !std::has_single_bit(static_cast<unsigned>(width))) {
    fail_thread(std::string(operation) + ": width " + std::to_string(width) + " is not a power of two up to 32");
  }
  if (source < first || source >= first + width) source = static_cast<int>(lane());
  if (!(mask >> source & 1)) {
    fail_thread(std::string(operation) + " reads lane " + std::to_string(source) + ", which is not in the mask");
  }
  return from_word<T>(exchange(mask, to_word(value), operation, site)[source]);
}

inline int segment(int width) { return static_cast<int>(lane()) / width * width; }

}  // namespace emulated

inline void __syncthreads(emulated::Site site = emulated::Site::current()) { emulated::wait_for_block(site); }

inline void __syncwarp(unsigned mask = ~0u, emulated::Site site = emulated::Site::current()) {
  emulated::exchange(mask, 0, "__syncwarp", site, true);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, emulated::Site site = emulated::Site::current()) {
  const int first = emulated::segment(width), from = first + (source & (width - 1));
  return emulated::shuffled(mask, value, from, first, width, "__shfl_sync", site);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, emulated::Site site = emulated::Site::current()) {
  const int from = static_cast<int>(emulated::lane()) - static_cast<int>(by);
  return emulated::shuffled(mask, value, from, emulated::segment(width), width, "__shfl_up_sync", site);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32,
                   emulated::Site site = emulated::Site::current()) {
  const int from = static_cast<int>(emulated::lane() + by);
  return emulated::shuffled(mask, value, from, emulated::segment(width), width, "__shfl_down_sync", site);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int flips, int width = 32, emulated::Site site = emulated::Site::current()) {
  const int from = static_cast<int>(emulated::lane()) ^ flips;
  return emulated::shuffled(mask, value, from, emulated::segment(width), width, "__shfl_xor_sync", site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, emulated::Site site = emulated::Site::current()) {
  const uint64_t* votes = emulated::exchange(mask, predicate != 0, "__ballot_sync", site);
  unsigned ballot = 0;
  for (unsigned i = 0; i < emulated::kLanes; ++i) ballot |= static_cast<unsigned>(votes[i]) << i;
  return ballot & mask;
}

inline int __any_sync(unsigned mask, int predicate, emulated::Site site = emulated::Site::current()) {
  return __ballot_sync(mask, predicate, site) != 0;
}

inline int __all_sync(unsigned mask, int predicate, emulated::Site site = emulated::Site::current()) {
  return __ballot_sync(mask, predicate, site) == mask;
}

template <typename T, typename Combine>
T emulated_reduce(unsigned mask, T value, Combine combine, const char* operation, emulated::Site site) {
  const uint64_t* values = emulated::exchange(mask, emulated::to_word(value), operation, site);
  int i = std::countr_zero(mask);
  T result = emulated::from_word<T>(values[i]);
  for (++i; i < static_cast<int>(emulated::kLanes); ++i) {
    if (mask >> i & 1) result = combine(result, emulated::from_word<T>(values[i]));
  }
  return result;
}

inline unsigned __reduce_add_sync(unsigned mask, unsigned value, emulated::Site site = emulated::Site::current()) {
  return emulated_reduce(mask, value, std::plus<unsigned>(), "__reduce_add_sync", site);
}

inline unsigned __reduce_max_sync(unsigned mask, unsigned value, emulated::Site site = emulated::Site::current()) {
  return emulated_reduce(mask, value, [](auto a, auto b) { return std::max(a, b); }, "__reduce_max_sync", site);
}

inline unsigned __match_any_sync(unsigned mask, uint64_t value, emulated::Site site = emulated::Site::current()) {
  const uint64_t* values = emulated::exchange(mask, value, "__match_any_sync", site);
  unsigned equal = 0;
  for (unsigned i = 0; i < emulated::kLanes; ++i) equal |= static_cast<unsigned>(values[i] == value) << i;
  return equal & mask;
}

template <typename T>
T atomicAdd(T* address, T value) {
  emulated::count_atomic(address);
  if constexpr (std::is_integral_v<T>) return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
  T old, sum;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  do sum = old + value;
  while (!__atomic_compare_exchange(address, &old, &sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}

template <typename T>
T atomicMax(T* address, T value) {
  emulated::count_atomic(address);
  T old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (old < value && !__atomic_compare_exchange_n(address, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __ffs(unsigned x) { return x == 0 ? 0 : std::countr_zero(x) + 1; }
inline int __popc(unsigned x) { return std::popcount(x); }

// Saturates; NaN is 2^63, as in PTX.
inline unsigned long long __float2ull_rn(float x) {
  const float rounded = std::nearbyint(x);
  if (std::isnan(x)) return 1ull << 63;
  if (rounded <= 0.0f) return 0;
  return rounded >= 0x1p64f ? ~0ull : static_cast<unsigned long long>(rounded);
}

using std::isfinite, std::isnan;

template <typename A, typename B>
constexpr auto min(A a, B b) {
  using C = std::common_type_t<A, B>;
  return std::min<C>(a, b);
}

template <typename A, typename B>
constexpr auto max(A a, B b) {
  using C = std::common_type_t<A, B>;
  return std::max<C>(a, b);
}

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1 };

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n_bytes, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);
