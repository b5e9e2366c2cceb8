// The product of a few rows with a tiled matrix: operator schema and CPU kernel. Generation computes logits with it;
// torch's product would repack the matrix at every call. Threads divide the tiles and compute in float32.
#include "tiles.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "activations.h"
#include "arena.h"
#include "bf16_dot.h"
#include "rope.h"

namespace realhf {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kProductsPerTask = 1 << 16;  // fewer do not repay a thread

#define REALHF_KERNEL_FILE "tile_rows.h"
#include "multi_isa.h"

template <typename scalar_t>
using Work = void (*)(const Matrix<scalar_t>&, int64_t, const float*, float*, int64_t);

// The last tile may have more outputs than the matrix: it is computed in a buffer.
template <typename scalar_t>
void run(const Tensor& x, const Tensor& tiles, Tensor& y) {
  const int64_t rows = x.size(0), depth = x.size(1), outs = y.size(1), whole = outs / kPadding * kPadding;
  const int64_t n_tiles = tiles.size(0), at_once = std::max<int64_t>(1, kProductsPerTask / (rows * depth * kPadding));
  const auto work = best_isa<Work<scalar_t>>(REALHF_ALL_ISAS(tiled_gemm<scalar_t>));
  const auto* from = static_cast<const scalar_t*>(x.const_data_ptr());
  const auto type = sizeof(scalar_t) == 4 ? TileType::float32 : TileType::bfloat16;
  const Matrix<scalar_t> all{static_cast<const char*>(tiles.const_data_ptr()), type, nullptr, n_tiles * kPadding, depth};
  float* const to = y.mutable_data_ptr<float>();
  float *x_float = nullptr, *last = nullptr;
  const auto memory =
      aligned_buffers([&](const auto& take) { x_float = take(rows * depth), last = take(rows * kPadding); });
  for (int64_t c = 0; c < rows * depth; c += kLanes) store(x_float + c, load(from + c));
  torch::stable::parallel_for(0, n_tiles, at_once, [&](int64_t first, int64_t stop) {
    const int64_t n_outs = std::min(stop * kPadding, whole) - first * kPadding;
    if (n_outs > 0) {
      work(all.part(first * kPadding, n_outs), rows, x_float, to + first * kPadding, outs);
    }
    if (stop * kPadding <= whole) return;
    work(all.part(whole, kPadding), rows, x_float, last, kPadding);
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(last + r * kPadding, outs - whole, to + r * outs + whole);
    }
  });
}

Tensor tiled_linear_cpu(const Tensor& x, const Tensor& tiles, int64_t outs) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.size(1) > 0 && x.size(1) % kPadding == 0,
                  "tiled_linear: x must be [S, D], contiguous, D a multiple of ", kPadding);
  STD_TORCH_CHECK(outs > 0 && tiles.dim() == 3 && tiles.is_contiguous() && tiles.size(1) == x.size(1) &&
                      tiles.size(0) == (outs - 1) / kPadding + 1 && tiles.size(2) == kPadding,
                  "tiled_linear: tiles must be [ceil(", outs, " / ", kPadding, "), ", x.size(1), ", ", kPadding,
                  "], contiguous");
  STD_TORCH_CHECK(x.scalar_type() == tiles.scalar_type() &&
                      (x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16),
                  "tiled_linear: x and tiles must be float32 or bfloat16, of the same type");
  Tensor result = torch::stable::new_empty(x, {x.size(0), outs}, ScalarType::Float);
  if (x.size(0) > 0) (x.scalar_type() == ScalarType::Float ? run<float> : run<BFloat16>)(x, tiles, result);
  return result;
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_FRAGMENT(realhf, library) {
  library.def("tiled_linear(Tensor x, Tensor tiles, int outs) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(realhf, CPU, library) { library.impl("tiled_linear", TORCH_BOX(&realhf::tiled_linear_cpu)); }
