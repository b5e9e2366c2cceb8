// The checked arguments of the interval kernels, for every device, as byte copies.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace realhf {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct Run {       // one interval, in bytes
  int64_t spread;  // offset in the tensor with gaps
  int64_t packed;  // offset in the tensor without gaps
};

struct Copies {
  std::vector<Run> runs;  // without empty intervals; a last run marks the end
  int64_t n_runs() const { return static_cast<int64_t>(runs.size()) - 1; }
  int64_t n_bytes() const { return runs.back().packed; }
  // The run that contains a byte of the packed tensor.
  int64_t run_at(int64_t byte) const {
    const auto after =
        std::upper_bound(runs.begin(), runs.end(), byte, [](int64_t at, const Run& run) { return at < run.packed; });
    return after - runs.begin() - 1;
  }
};

inline Copies checked_copies(const Tensor& spread, const Tensor& intervals) {
  STD_TORCH_CHECK(spread.dim() == 1, "intervals need a 1-D tensor, not one of ", spread.dim(), " dimensions");
  STD_TORCH_CHECK(intervals.is_cpu() && intervals.scalar_type() == ScalarType::Long,
                  "intervals must be int64 on the CPU on every device");
  STD_TORCH_CHECK(intervals.dim() == 2 && intervals.size(1) == 2, "intervals must be [N, 2]");
  const Tensor listed = torch::stable::contiguous(intervals);
  const int64_t* bounds = listed.const_data_ptr<int64_t>();
  const int64_t n_elements = spread.numel(), width = static_cast<int64_t>(spread.element_size());
  Copies copies;
  copies.runs.reserve(intervals.size(0) + 1);
  int64_t packed = 0;
  for (int64_t i = 0; i < intervals.size(0); ++i) {
    const int64_t begin = bounds[2 * i], end = bounds[2 * i + 1];
    STD_TORCH_CHECK(0 <= begin && begin <= end && end <= n_elements, "interval ", i, " runs from ", begin, " to ", end,
                    " in a tensor of ", n_elements, " elements");
    if (begin < end) copies.runs.push_back({begin * width, packed});
    packed += (end - begin) * width;
  }
  copies.runs.push_back({n_elements * width, packed});
  return copies;
}

// Overlapping writes would make the result depend on the order of threads.
inline void check_disjoint(const Copies& copies) {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  ranges.reserve(copies.n_runs());
  for (int64_t i = 0; i < copies.n_runs(); ++i) {
    const Run& run = copies.runs[i];
    ranges.emplace_back(run.spread, run.spread + copies.runs[i + 1].packed - run.packed);
  }
  if (!std::is_sorted(ranges.begin(), ranges.end())) std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    STD_TORCH_CHECK(ranges[i - 1].second <= ranges[i].first, "intervals to write overlap: bytes ", ranges[i - 1].first,
                    " to ", ranges[i - 1].second, " and ", ranges[i].first, " to ", ranges[i].second);
  }
}

inline Tensor empty_result(const Tensor& src, const Copies& copies) {
  return torch::stable::new_empty(src, {copies.n_bytes() / static_cast<int64_t>(src.element_size())});
}

inline Copies checked_writes(const Tensor& src, const Tensor& dst, const Tensor& intervals) {
  STD_TORCH_CHECK(src.scalar_type() == dst.scalar_type() && src.device() == dst.device(),
                  "set_intervals: src and dst must have one dtype and one device");
  STD_TORCH_CHECK(src.dim() == 1 && dst.is_contiguous(), "set_intervals: src must be 1-D, dst contiguous");
  Copies copies = checked_copies(dst, intervals);
  STD_TORCH_CHECK(copies.n_bytes() == src.numel() * static_cast<int64_t>(src.element_size()),
                  "set_intervals: the intervals have ", copies.n_bytes() / static_cast<int64_t>(src.element_size()),
                  " elements, src has ", src.numel());
  check_disjoint(copies);
  return copies;
}

}  // namespace realhf
