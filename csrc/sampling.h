// The checked arguments of sample_tokens and counter_uniform, and their hash, for every device.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#if defined(__CUDACC__)
#define REALHF_HOST_DEVICE __host__ __device__
#else
#define REALHF_HOST_DEVICE
#endif

namespace realhf {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kNoToken = -1;  // of a row whose logits are not finite

// The finaliser of splitmix64 (Steele, Lea, Flood 2014).
REALHF_HOST_DEVICE inline uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

REALHF_HOST_DEVICE inline double uniform_of(uint64_t seed, uint64_t prompt, uint64_t sample, uint64_t position) {
  constexpr uint64_t kIncrement = 0x9E3779B97F4A7C15u;
  uint64_t state = mixed(seed + kIncrement);
  state = mixed((state ^ prompt) + kIncrement);
  state = mixed((state ^ sample) + kIncrement);
  state = mixed((state ^ position) + kIncrement);
  return static_cast<double>(state >> 11) * 0x1p-53;
}

struct Counters {  // contiguous, [S] int64 each
  Tensor prompts, samples, positions;
};

inline Counters checked_counters(const Tensor& prompts, const Tensor& samples, const Tensor& positions) {
  for (const Tensor* given : {&prompts, &samples, &positions}) {
    STD_TORCH_CHECK(given->dim() == 1 && given->numel() == prompts.numel() &&
                        given->scalar_type() == ScalarType::Long && given->device() == prompts.device(),
                    "counter_uniform: counters must be [S] int64 on one device");
  }
  return {torch::stable::contiguous(prompts), torch::stable::contiguous(samples), torch::stable::contiguous(positions)};
}

struct Drawing {                      // contiguous
  Tensor logits;                      // [S, V] float32
  Tensor u;                           // [S] float64
  std::optional<Tensor> forbid;       // [n] int64
  std::optional<Tensor> forbid_rows;  // [S] bool; none: all rows
  float temperature;                  // 0: the most likely token
  int64_t top_k;                      // 0: all
  double top_p;
  int64_t n_rows, vocab;

  const int64_t* forbidden() const { return forbid ? forbid->const_data_ptr<int64_t>() : nullptr; }
  int64_t n_forbidden() const { return forbid ? forbid->numel() : 0; }
  const bool* rows() const { return forbid_rows ? forbid_rows->const_data_ptr<bool>() : nullptr; }
};

inline std::optional<Tensor> contiguous_if_any(const std::optional<Tensor>& given) {
  return given ? std::optional<Tensor>(torch::stable::contiguous(*given)) : std::nullopt;
}

inline Drawing checked_drawing(const Tensor& logits, const Tensor& u, const std::optional<Tensor>& forbid,
                               const std::optional<Tensor>& forbid_rows, double temperature, int64_t top_k,
                               double top_p) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == ScalarType::Float && logits.size(1) > 0,
                  "sample_tokens: logits must be [S, V] float32, V at least 1");
  const int64_t n_rows = logits.size(0), vocab = logits.size(1);
  STD_TORCH_CHECK(vocab < (int64_t{1} << 32), "sample_tokens: at most 2^32 - 1 tokens");
  STD_TORCH_CHECK(u.dim() == 1 && u.numel() == n_rows && u.scalar_type() == ScalarType::Double,
                  "sample_tokens: u must be [", n_rows, "] float64");
  STD_TORCH_CHECK(!forbid || (forbid->dim() == 1 && forbid->scalar_type() == ScalarType::Long),
                  "sample_tokens: forbid must be [n] int64");
  STD_TORCH_CHECK(!forbid_rows || (forbid_rows->dim() == 1 && forbid_rows->numel() == n_rows &&
                                   forbid_rows->scalar_type() == ScalarType::Bool),
                  "sample_tokens: forbid_rows must be [", n_rows, "] bool");
  STD_TORCH_CHECK(u.device() == logits.device() && (!forbid || forbid->device() == logits.device()) &&
                      (!forbid_rows || forbid_rows->device() == logits.device()),
                  "sample_tokens: all tensors must be on one device");
  STD_TORCH_CHECK(temperature >= 0.0 && top_k >= 0 && top_p > 0.0 && top_p <= 1.0,
                  "sample_tokens: need temperature >= 0, top_k >= 0, 0 < top_p <= 1: got ", temperature, ", ", top_k,
                  ", ", top_p);
  return {torch::stable::contiguous(logits),
          torch::stable::contiguous(u),
          contiguous_if_any(forbid),
          contiguous_if_any(forbid_rows),
          static_cast<float>(temperature),
          top_k < vocab ? top_k : 0,
          top_p,
          n_rows,
          vocab};
}

struct Drawn {  // [S] each
  Tensor tokens, logprobs, sampling_logprobs;
};

inline Drawn empty_drawn(const Drawing& drawing) {
  const int64_t n = drawing.n_rows;
  return {torch::stable::new_empty(drawing.logits, {n}, ScalarType::Long),
          torch::stable::new_empty(drawing.logits, {n}), torch::stable::new_empty(drawing.logits, {n})};
}

}  // namespace realhf
