// The checked arguments of packed_gae, for every device.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace realhf {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct PackedRows {  // contiguous
  Tensor rewards;    // [T] float32 or float64
  Tensor values;     // [T] like rewards
  Tensor starts;     // [B+1] int64 on the host; row b is tokens starts[b] .. starts[b+1]
  Tensor bootstrap;  // [B] bool
};

// cu_seqlens is on the host for every device, so that its contents are checked without synchronisation.
inline Tensor checked_starts(const Tensor& cu_seqlens, int64_t n_tokens) {
  STD_TORCH_CHECK(cu_seqlens.is_cpu(), "packed_gae: cu_seqlens must be on the CPU on every device");
  STD_TORCH_CHECK(cu_seqlens.scalar_type() == ScalarType::Long || cu_seqlens.scalar_type() == ScalarType::Int,
                  "packed_gae: cu_seqlens must be int32 or int64");
  STD_TORCH_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.numel() >= 1, "packed_gae: cu_seqlens must be [B+1]");
  Tensor starts = torch::stable::contiguous(torch::stable::to(cu_seqlens, ScalarType::Long));
  const int64_t* start = starts.const_data_ptr<int64_t>();
  const int64_t n_rows = starts.numel() - 1;
  STD_TORCH_CHECK(start[0] == 0 && start[n_rows] == n_tokens, "packed_gae: cu_seqlens must run from 0 to ", n_tokens,
                  ", the number of values, but runs from ", start[0], " to ", start[n_rows]);
  for (int64_t row = 0; row < n_rows; ++row) {
    STD_TORCH_CHECK(start[row] < start[row + 1], "packed_gae: row ", row, " of cu_seqlens runs from ", start[row],
                    " to ", start[row + 1], "; a row has at least one token");
  }
  return starts;
}

inline PackedRows checked_rows(const Tensor& rewards, const Tensor& values, const Tensor& cu_seqlens,
                               const Tensor& bootstrap) {
  STD_TORCH_CHECK(values.scalar_type() == ScalarType::Float || values.scalar_type() == ScalarType::Double,
                  "packed_gae: values must be float32 or float64");
  STD_TORCH_CHECK(rewards.scalar_type() == values.scalar_type(), "packed_gae: rewards must have the dtype of values");
  STD_TORCH_CHECK(bootstrap.scalar_type() == ScalarType::Bool, "packed_gae: bootstrap must be bool");
  STD_TORCH_CHECK(rewards.device() == values.device() && bootstrap.device() == values.device(),
                  "packed_gae: rewards, values and bootstrap must be on one device");
  STD_TORCH_CHECK(values.dim() == 1 && rewards.dim() == 1 && rewards.numel() == values.numel(),
                  "packed_gae: rewards and values must both be [T], but have ", rewards.dim(), " and ", values.dim(),
                  " dimensions, ", rewards.numel(), " and ", values.numel(), " elements");
  Tensor starts = checked_starts(cu_seqlens, values.numel());
  STD_TORCH_CHECK(bootstrap.dim() == 1 && bootstrap.numel() == starts.numel() - 1,
                  "packed_gae: bootstrap must be [B], ", starts.numel() - 1, " rows, but has ", bootstrap.dim(),
                  " dimensions and ", bootstrap.numel(), " elements");
  return {torch::stable::contiguous(rewards), torch::stable::contiguous(values), starts,
          torch::stable::contiguous(bootstrap)};
}

}  // namespace realhf
