// The execution model of CUDA on one CPU thread: every CUDA thread of a block is a fiber, blocks run one after another.
// runtime.cpp has the scheduler, cuda_runtime.h the names that kernels use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <string>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr uint64_t count() const { return uint64_t{x} * y * z; }
};

extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

using Site = std::source_location;  // of a barrier or a warp operation in the kernel

constexpr unsigned kLanes = 32;

struct Configuration {  // the arguments of <<<...>>>
  const char* kernel;
  dim3 grid, block;
  size_t dynamic_bytes;
  void* stream;
};

// Runs a kernel, or records an error for cudaGetLastError if the device would refuse the configuration.
// std::runtime_error: the kernel breaks a rule, such as a barrier that some threads never reach.
void run(const Configuration& configuration, const std::function<void()>& kernel);

[[noreturn]] void fail_thread(const std::string& message);  // ends the launch with an error that names the thread
void wait_for_block(Site site);                             // __syncthreads
// Waits for all lanes of the mask at this site; returns the 32 values, valid until the lane waits again.
const uint64_t* exchange(unsigned mask, uint64_t value, const char* operation, Site site, bool orders_memory = false);
unsigned lane();
void count_atomic(const void* address);
uint64_t block_number();  // unique over all launches

// Memory of the running block, filled with a pattern; size 0: the dynamic shared memory, whose size is returned.
std::byte* shared_memory(size_t size, size_t& n_bytes);

// Memory of the host, which kernels cannot read; `forget` ends that.
void mark_host_memory(const void* start, size_t n_bytes);
void forget_host_memory();
void check_device_pointer(const char* kernel, const void* pointer);

void check_stream(const char* operation, void* stream);
int device_of_tensors();

struct Counts {  // of all launches since they were last taken
  uint64_t launches, blocks, barriers, exchanges, atomics;
  uint64_t hottest;  // atomics of one block to one address
};

Counts take_counts();
void set_seed(uint64_t seed);  // of the order of threads; 0: by index
void set_max_waits(uint64_t waits);  // of one block, before it counts as endless
const std::string& unchecked_launch();  // the last kernel, if cudaGetLastError has not been called since

}  // namespace emulated
