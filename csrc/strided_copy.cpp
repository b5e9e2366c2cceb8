// Copies a box between tensors with different strides: operator schema and CPU kernel.
// realhf/ops/strided_copy.py documents the operator. Elements of all types are moved as bytes.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "bytes.h"

namespace realhf {
namespace {

using torch::stable::Tensor;

constexpr int64_t kBytesPerTask = 1 << 17;
constexpr int64_t kLine = 64;
constexpr int64_t kLongRun = 1 << 15;  // the hardware prefetcher handles longer runs

struct Place {  // byte offsets in both tensors
  int64_t to, from;
};

struct Dim {
  int64_t size;
  Place stride;
};

// A box as runs of bytes that are contiguous in both tensors, and the outer dimensions, innermost first.
struct Runs {
  std::vector<Dim> around;
  int64_t run_bytes, n_bytes;

  Place place_of(int64_t number) const {
    Place place{0, 0};
    for (const Dim& dim : around) {
      place.to += number % dim.size * dim.stride.to;
      place.from += number % dim.size * dim.stride.from;
      number /= dim.size;
    }
    return place;
  }

  bool is_source_strided() const {
    return run_bytes < kLongRun && !around.empty() && around[0].stride.from != run_bytes;
  }
};

Runs runs_of(const Tensor& to, const Tensor& from) {
  const int64_t width = static_cast<int64_t>(to.element_size());
  Runs runs{{}, width, width * to.numel()};
  for (int64_t d = to.dim() - 1; d >= 0; --d) {
    const Dim dim{to.size(d), {to.stride(d) * width, from.stride(d) * width}};
    if (dim.size == 1) continue;
    if (runs.around.empty() && dim.stride.to == runs.run_bytes && dim.stride.from == runs.run_bytes) {
      runs.run_bytes *= dim.size;
    } else {
      runs.around.push_back(dim);
    }
  }
  return runs;
}

void check_alike(const Tensor& to, const Tensor& from) {
  STD_TORCH_CHECK(to.scalar_type() == from.scalar_type(), "copy_box_: both tensors must have one dtype");
  STD_TORCH_CHECK(to.dim() == from.dim(), "copy_box_: one tensor has ", to.dim(), " dimensions, the other ",
                  from.dim());
  for (int64_t d = 0; d < to.dim(); ++d) {
    STD_TORCH_CHECK(to.size(d) == from.size(d), "copy_box_: dimension ", d, " has ", to.size(d), " and ", from.size(d),
                    " elements");
  }
}

void copy_box_cpu(Tensor to, const Tensor& from, bool streaming) {
  check_alike(to, from);
  if (to.numel() == 0) return;
  const Runs runs = runs_of(to, from);
  const bool fetch = runs.is_source_strided();
  auto* target = static_cast<char*>(to.mutable_data_ptr());
  const auto* source = static_cast<const char*>(from.const_data_ptr());
  const CopyBytes copy = streaming ? copy_streaming : copy_cached;
  torch::stable::parallel_for(0, runs.n_bytes, kBytesPerTask, [&](int64_t first, int64_t stop) {
    int64_t number = first / runs.run_bytes, done = first % runs.run_bytes;
    Place place = runs.place_of(number);
    for (int64_t at = first; at < stop; done = 0) {
      const int64_t n_bytes = std::min(stop - at, runs.run_bytes - done);
      const Place next = runs.place_of(++number);  // wraps around after the last one
      for (int64_t line = 0; fetch && line < runs.run_bytes; line += kLine) {
        __builtin_prefetch(source + next.from + line);
      }
      copy(target + place.to + done, source + place.from + done, n_bytes);
      at += n_bytes;
      place = next;
    }
    finish_streaming();
  });
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_FRAGMENT(realhf, library) {
  library.def("copy_box_(Tensor(a!) target, Tensor source, bool streaming) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(realhf, CPU, library) { library.impl("copy_box_", TORCH_BOX(&realhf::copy_box_cpu)); }
