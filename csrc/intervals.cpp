// Gather from and scatter to intervals of a 1-D tensor: operator schemas and CPU kernels.
// realhf/ops/intervals.py documents the operators. Elements of all types are moved as bytes.
#include "intervals.h"

#include "bytes.h"

namespace realhf {
namespace {

constexpr int64_t kBytesPerTask = 1 << 17;
constexpr int64_t kStreamedBytes = 1 << 24;  // larger copies would evict everything else from the caches

CopyBytes copy_for(const Copies& copies) { return copies.n_bytes() < kStreamedBytes ? copy_cached : copy_streaming; }

// Calls copy(spread, packed, n_bytes) for all runs, divided into tasks of equal size.
template <typename Copy>
void for_each_run(const Copies& copies, const Copy& copy) {
  torch::stable::parallel_for(0, copies.n_bytes(), kBytesPerTask, [&](int64_t first, int64_t stop) {
    for (int64_t i = copies.run_at(first), at = first; at < stop; ++i) {
      const Run& run = copies.runs[i];
      const int64_t end = std::min(stop, copies.runs[i + 1].packed);
      copy(run.spread + at - run.packed, at, end - at);
      at = end;
    }
    finish_streaming();
  });
}

Tensor slice_intervals_cpu(const Tensor& src, const Tensor& intervals) {
  const Copies copies = checked_copies(src, intervals);
  const Tensor source = torch::stable::contiguous(src);
  Tensor result = empty_result(source, copies);
  const auto* spread = static_cast<const char*>(source.const_data_ptr());
  auto* packed = static_cast<char*>(result.mutable_data_ptr());
  const auto copy = copy_for(copies);
  for_each_run(copies, [&](int64_t from, int64_t to, int64_t n_bytes) { copy(packed + to, spread + from, n_bytes); });
  return result;
}

void set_intervals_cpu(const Tensor& src, Tensor dst, const Tensor& intervals) {
  const Copies copies = checked_writes(src, dst, intervals);
  const Tensor source = torch::stable::contiguous(src);
  const auto* packed = static_cast<const char*>(source.const_data_ptr());
  auto* spread = static_cast<char*>(dst.mutable_data_ptr());
  const auto copy = copy_for(copies);
  for_each_run(copies, [&](int64_t to, int64_t from, int64_t n_bytes) { copy(spread + to, packed + from, n_bytes); });
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_FRAGMENT(realhf, library) {
  library.def("slice_intervals(Tensor src, Tensor intervals) -> Tensor");
  library.def("set_intervals(Tensor src, Tensor(a!) dst, Tensor intervals) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(realhf, CPU, library) {
  library.impl("slice_intervals", TORCH_BOX(&realhf::slice_intervals_cpu));
  library.impl("set_intervals", TORCH_BOX(&realhf::set_intervals_cpu));
}
