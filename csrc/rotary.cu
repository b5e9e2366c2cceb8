// Rotary position embeddings of packed tokens: CUDA kernel, one thread block per token.
// realhf/ops/norms.py documents the operator, norms.cpp has its schema.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "device.h"
#include "device_floats.h"
#include "rope.h"

namespace realhf {
namespace {

using torch::stable::Tensor;

constexpr int kThreads = 256;

// Counts are in packs. The pairs of a head are (i, half + i) for i < half; elements after 2 * half are copied.
template <typename pack_t>
__global__ void __launch_bounds__(kThreads)
    rotate(const pack_t* x, int64_t token_stride, int64_t head_stride, const float* angles, int64_t count,
           const int64_t* positions, float direction, int heads, int dim, int half, pack_t* out) {
  const int64_t token = blockIdx.x, width = static_cast<int64_t>(2 * half) * pack_t::kCount;
  const float* cosines = angles + positions[token] * width;
  const float* sines = cosines + count * width;
  x += token * token_stride;
  out += token * heads * dim;
  for (int i = threadIdx.x; i < heads * half; i += kThreads) {
    const int head = i / half, pair = i % half;
    const pack_t* from = x + head * head_stride + pair;
    const pack_t first = from[0], second = from[half];
    pack_t first_out, second_out;
    for (int j = 0; j < pack_t::kCount; ++j) {
      const int left = pair * pack_t::kCount + j, right = left + half * pack_t::kCount;
      const float a = value_of(first.at[j]), b = value_of(second.at[j]);
      assign(first_out.at[j], a * cosines[left] + b * (direction * sines[left]));
      assign(second_out.at[j], b * cosines[right] + a * (direction * sines[right]));
    }
    pack_t* to = out + head * dim + pair;
    to[0] = first_out;
    to[half] = second_out;
  }
  const int rest = dim - 2 * half;
  for (int i = threadIdx.x; i < heads * rest; i += kThreads) {
    const int head = i / rest, at = 2 * half + i % rest;
    out[head * dim + at] = x[head * head_stride + at];
  }
}

Tensor rotate_cuda(const Tensor& x, const Tensor& angles, const Tensor& positions, bool inverse) {
  STD_TORCH_CHECK(x.dim() == 3 && x.stride(2) == 1, "rotate: x must be [T, heads, d] with adjacent elements of a head");
  const int64_t tokens = x.size(0), heads = x.size(1), dim = x.size(2);
  const Rope rope = checked_rope(angles, dim);
  STD_TORCH_CHECK(positions.dim() == 1 && positions.size(0) == tokens && positions.is_contiguous() &&
                      positions.scalar_type() == torch::headeronly::ScalarType::Long,
                  "rotate: positions must be [T] int64, contiguous");
  Tensor out = torch::stable::new_empty(x, {tokens, heads, dim});
  if (out.numel() == 0) return out;
  STD_TORCH_CHECK(rope.count > 0 && heads * dim < int64_t{1} << 31, "rotate: no angles, or heads that are too large");
  const int64_t half = rope.rotary_dim / 2;
  const Launch on(x);
  for_type("rotate", x, [&](auto* type) {
    using scalar_t = std::remove_pointer_t<decltype(type)>;
    const auto sizes = {dim, half, x.stride(0), x.stride(1)};
    for_pack<scalar_t>({x.const_data_ptr(), out.const_data_ptr()}, sizes, [&](auto* packs) {
      using pack_t = std::remove_pointer_t<decltype(packs)>;
      constexpr int64_t kCount = pack_t::kCount;
      rotate<<<blocks_for(tokens, 1), kThreads, 0, on.stream()>>>(
          static_cast<const pack_t*>(x.const_data_ptr()), x.stride(0) / kCount, x.stride(1) / kCount, rope.angles,
          rope.count, positions.const_data_ptr<int64_t>(), inverse ? -1.0f : 1.0f, static_cast<int>(heads),
          static_cast<int>(dim / kCount), static_cast<int>(half / kCount), static_cast<pack_t*>(out.mutable_data_ptr()));
    });
  });
  on.check("rotate");
  return out;
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_IMPL(realhf, CUDA, library) { library.impl("rotate", TORCH_BOX(&realhf::rotate_cuda)); }
