// The checked arguments of gae_2d, for every device.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace realhf {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct Slots {       // contiguous; B slots, T steps
  Tensor rewards;    // [B, T] float32 or float64
  Tensor values;     // [B, T+1] like rewards
  Tensor ends;       // [B, T+1] bool
  Tensor truncates;  // [B, T+1] bool
  int64_t n_slots, n_steps;
};

inline Slots checked_slots(const Tensor& rewards, const Tensor& values, const Tensor& ends, const Tensor& truncates) {
  STD_TORCH_CHECK(values.scalar_type() == ScalarType::Float || values.scalar_type() == ScalarType::Double,
                  "gae_2d: values must be float32 or float64");
  STD_TORCH_CHECK(rewards.scalar_type() == values.scalar_type(), "gae_2d: rewards must have the dtype of values");
  STD_TORCH_CHECK(ends.scalar_type() == ScalarType::Bool && truncates.scalar_type() == ScalarType::Bool,
                  "gae_2d: ends and truncates must be bool");
  STD_TORCH_CHECK(rewards.dim() == 2, "gae_2d: rewards must be [B, T]");
  const int64_t n_slots = rewards.size(0), n_steps = rewards.size(1);
  for (const Tensor* given : {&values, &ends, &truncates}) {
    STD_TORCH_CHECK(given->dim() == 2 && given->size(0) == n_slots && given->size(1) == n_steps + 1,
                    "gae_2d: values, ends and truncates must be [", n_slots, ", ", n_steps + 1, "]");
    STD_TORCH_CHECK(given->device() == rewards.device(), "gae_2d: all tensors must be on one device");
  }
  return {torch::stable::contiguous(rewards),
          torch::stable::contiguous(values),
          torch::stable::contiguous(ends),
          torch::stable::contiguous(truncates),
          n_slots,
          n_steps};
}

}  // namespace realhf
