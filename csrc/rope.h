// Rotary position embeddings (RoFormer, arXiv 2104.09864).
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

namespace realhf {

// [2, count, rotary_dim]: cosines and signed sines; no rotation if `rotary_dim` is 0.
struct Rope {
  const float* angles;
  int64_t count, rotary_dim;
};

inline Rope checked_rope(const std::optional<torch::stable::Tensor>& angles, int64_t dim) {
  if (!angles) return {nullptr, 0, 0};
  STD_TORCH_CHECK(angles->dim() == 3 && angles->size(0) == 2 && angles->size(2) <= dim && angles->size(2) % 2 == 0 &&
                      angles->is_contiguous() && angles->scalar_type() == torch::headeronly::ScalarType::Float,
                  "angles must be [2, positions, rotary_dim <= ", dim, "] float32, contiguous");
  return {angles->const_data_ptr<float>(), angles->size(1), angles->size(2)};
}

}  // namespace realhf
