// Gather from and scatter to intervals of a 1-D tensor: CUDA kernels.
// realhf/ops/intervals.py documents the operators, intervals.cpp has the schemas. Elements are moved as bytes.
#include "device.h"
#include "intervals.h"

namespace realhf {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBytesPerBlock = 1 << 15;

// Copies in the widest words that the alignment of both pointers and the length allow.
__device__ void copy_bytes(char* to, const char* from, int64_t n_bytes) {
  const auto misfit = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | n_bytes;
  if (misfit % sizeof(uint4) == 0) {
    for (int64_t i = threadIdx.x; i < n_bytes / static_cast<int64_t>(sizeof(uint4)); i += kThreads) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
  } else if (misfit % sizeof(uint32_t) == 0) {
    for (int64_t i = threadIdx.x; i < n_bytes / static_cast<int64_t>(sizeof(uint32_t)); i += kThreads) {
      reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(from)[i];
    }
  } else if (misfit % sizeof(uint16_t) == 0) {
    for (int64_t i = threadIdx.x; i < n_bytes / static_cast<int64_t>(sizeof(uint16_t)); i += kThreads) {
      reinterpret_cast<uint16_t*>(to)[i] = reinterpret_cast<const uint16_t*>(from)[i];
    }
  } else {
    for (int64_t i = threadIdx.x; i < n_bytes; i += kThreads) to[i] = from[i];
  }
}

// Each block moves kBytesPerBlock packed bytes, of any number of runs. runs[n_runs] marks the end.
__global__ void copy_runs(char* spread, char* packed, const Run* runs, int64_t n_runs, bool gather) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kBytesPerBlock;
  const int64_t stop = min(first + kBytesPerBlock, runs[n_runs].packed);
  int64_t low = 0, high = n_runs;  // the run that holds `first` is in low..high-1
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (runs[middle].packed <= first ? low : high) = middle;
  }
  for (int64_t at = first; at < stop; ++low) {
    const int64_t end = min(stop, runs[low + 1].packed);
    char* gapped = spread + runs[low].spread + at - runs[low].packed;
    copy_bytes(gather ? packed + at : gapped, gather ? gapped : packed + at, end - at);
    at = end;
  }
}

void launch(const Copies& copies, void* spread, void* packed, bool gather, const Tensor& where, const char* name) {
  if (copies.n_bytes() == 0) return;
  const Launch on(where);
  const int64_t size = static_cast<int64_t>(copies.runs.size() * sizeof(Run));
  Tensor table = torch::stable::new_empty(where, {size}, ScalarType::Byte);
  // the call has read pageable memory when it returns
  STD_TORCH_CHECK(cudaMemcpyAsync(table.mutable_data_ptr(), copies.runs.data(), size, cudaMemcpyHostToDevice,
                                  on.stream()) == cudaSuccess,
                  name, ": copying the intervals to the device failed");
  copy_runs<<<blocks_for(copies.n_bytes(), kBytesPerBlock), kThreads, 0, on.stream()>>>(
      static_cast<char*>(spread), static_cast<char*>(packed), static_cast<const Run*>(table.const_data_ptr()),
      copies.n_runs(), gather);
  on.check(name);
}

Tensor slice_intervals_cuda(const Tensor& src, const Tensor& intervals) {
  const Copies copies = checked_copies(src, intervals);
  const Tensor source = torch::stable::contiguous(src);
  Tensor result = empty_result(source, copies);
  launch(copies, source.data_ptr(), result.mutable_data_ptr(), true, source, "slice_intervals");
  return result;
}

void set_intervals_cuda(const Tensor& src, Tensor dst, const Tensor& intervals) {
  const Copies copies = checked_writes(src, dst, intervals);
  const Tensor source = torch::stable::contiguous(src);
  launch(copies, dst.mutable_data_ptr(), source.data_ptr(), false, dst, "set_intervals");
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_IMPL(realhf, CUDA, library) {
  library.impl("slice_intervals", TORCH_BOX(&realhf::slice_intervals_cuda));
  library.impl("set_intervals", TORCH_BOX(&realhf::set_intervals_cuda));
}
