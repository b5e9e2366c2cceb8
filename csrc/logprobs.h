// Argument checks of the logit kernels, for every device.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace realhf {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check_logits(const char* name, const Tensor& logits, const Tensor& targets) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.is_contiguous(), name, ": logits must be [n, V], contiguous");
  STD_TORCH_CHECK(targets.dim() == 1 && targets.numel() == logits.size(0) && targets.scalar_type() == ScalarType::Long,
                  name, ": targets must be [", logits.size(0), "] int64");
  STD_TORCH_CHECK(targets.device() == logits.device(), name, ": logits and targets must be on one device");
}

inline void check_per_row(const char* name, const Tensor& given, const Tensor& targets) {
  STD_TORCH_CHECK(given.dim() == 1 && given.numel() == targets.numel() && given.scalar_type() == ScalarType::Float &&
                      given.device() == targets.device(),
                  name, ": normalisers, logprobs and grads must be [", targets.numel(),
                  "] float32 on the device of logits");
}

inline Tensor empty_per_row(const Tensor& targets) {
  return torch::stable::new_empty(targets, {targets.numel()}, ScalarType::Float);
}

}  // namespace realhf
