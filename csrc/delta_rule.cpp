// The gated delta rule over packed rows (arXiv 2412.06464, equation 10) with its gradients: operator schemas and CPU
// kernels. realhf/ops/delta/gated_delta_rule.py documents the rule. Threads divide rows and key heads, and compute in
// float32, token by token. The backward pass computes states again, from those before every block of tokens.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "activations.h"
#include "arena.h"
#include "delta_table.h"
#include "rope.h"

namespace realhf {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr float kNormEps = 1e-6f;   // of the norms of queries and keys
constexpr int64_t kBlock = 64;      // tokens between stored states

struct RuleShape {
  int64_t n_keys, n_values, key_dim, value_dim;

  int64_t ratio() const { return n_values / n_keys; }
  int64_t keys() const { return n_keys * key_dim; }
  int64_t values() const { return n_values * value_dim; }
  int64_t channels() const { return 2 * keys() + values(); }
  int64_t state() const { return key_dim * value_dim; }
  int64_t forward_scratch() const { return 3 * key_dim + (ratio() + 2) * value_dim; }
  int64_t backward_scratch() const {
    return kBlock * (4 * key_dim + state() + value_dim) + 3 * value_dim + key_dim;
  }
};

// A packed row: its tokens, its first block of stored states, and the row it continues or -1.
struct RuleRow {
  int64_t start, count, block, prefix;
};

template <typename scalar_t>
struct RuleInputs {
  const scalar_t* mixed;
  const float *decay, *rate, *slopes;  // `slopes` are the gradients of outputs
};

template <typename scalar_t>
struct RuleGrads {
  scalar_t* mixed;
  float *decay, *rate;
};

#define REALHF_KERNEL_FILE "delta_rule_rows.h"
#include "multi_isa.h"

struct RuleRows {
  DeltaTable table;
  std::vector<RuleRow> rows;
  int64_t blocks = 0;
};

RuleRows rule_rows(const Tensor& given) {
  RuleRows found{checked_table(given)};
  for (const DeltaRow& row : found.table.rows) {
    found.rows.push_back({row.start, row.count, found.blocks, row.prefix});
    found.blocks += (row.count + kBlock - 1) / kBlock;
  }
  return found;
}

bool is_floats(const Tensor& x, int64_t rows, int64_t across) {
  return x.dim() == 2 && x.size(0) == rows && x.size(1) == across && x.is_contiguous() &&
         x.scalar_type() == ScalarType::Float;
}

RuleShape checked_rule(const Tensor& mixed, const Tensor& decay, const Tensor& rate, const Tensor& states,
                       const RuleRows& rows) {
  STD_TORCH_CHECK(states.dim() == 4 && states.is_contiguous() && states.scalar_type() == ScalarType::Float &&
                      states.size(0) == static_cast<int64_t>(rows.rows.size()),
                  "delta_rule: states must be [B, Hv, dk, dv] float32, contiguous");
  RuleShape shape{0, states.size(1), states.size(2), states.size(3)};
  for (const int64_t size : {shape.n_values, shape.key_dim, shape.value_dim}) {
    STD_TORCH_CHECK(size > 0 && size <= kMaxSize, "delta_rule: size ", size);
  }
  STD_TORCH_CHECK(shape.key_dim % kLanes == 0 && shape.value_dim % kLanes == 0,
                  "delta_rule: dk and dv must be multiples of ", kLanes);
  STD_TORCH_CHECK(mixed.dim() == 2 && mixed.size(0) == rows.table.tokens && mixed.is_contiguous() &&
                      mixed.size(1) <= kMaxSize && mixed.size(1) > shape.values() &&
                      (mixed.size(1) - shape.values()) % (2 * shape.key_dim) == 0,
                  "delta_rule: mixed must be [T, 2 * Hk * dk + Hv * dv], contiguous");
  STD_TORCH_CHECK(mixed.scalar_type() == ScalarType::Float || mixed.scalar_type() == ScalarType::BFloat16,
                  "delta_rule: mixed must be float32 or bfloat16");
  shape.n_keys = (mixed.size(1) - shape.values()) / (2 * shape.key_dim);
  STD_TORCH_CHECK(shape.n_values % shape.n_keys == 0, "delta_rule: ", shape.n_values, " heads over ", shape.n_keys);
  STD_TORCH_CHECK(is_floats(decay, rows.table.tokens, shape.n_values) && is_floats(rate, rows.table.tokens, shape.n_values),
                  "delta_rule: decay and rate must be [T, Hv] float32, contiguous");
  return shape;
}

// Calls work(row, key head, scratch) for all rows of a group, in parallel.
template <typename Work>
void for_each_head(const RuleRows& all, const std::vector<int64_t>& group, const RuleShape& shape, int64_t scratch,
                   const Work& work) {
  const int64_t count = static_cast<int64_t>(group.size()) * shape.n_keys;
  torch::stable::parallel_for(0, count, 1, [&](int64_t first, int64_t stop) {
    float* own = nullptr;
    const auto memory = aligned_buffers([&](const auto& take) { own = take(scratch); });
    for (int64_t at = first; at < stop; ++at) {
      const int64_t row = group[at / shape.n_keys];
      work(all.rows[row], row, at % shape.n_keys, own);
    }
  });
}

template <typename scalar_t>
void forward(const RuleShape& shape, const RuleRows& rows, const RuleInputs<scalar_t>& given, float* states,
             float* blocks, float* outputs) {
  using Work = void (*)(const RuleShape&, const RuleInputs<scalar_t>&, const RuleRow&, int64_t, float*, float*, float*,
                        float*);
  const auto work = best_isa<Work>(REALHF_ALL_ISAS(rule_forward));
  const int64_t size = shape.ratio() * shape.state();  // of the states of a key head
  for (const auto* group : {&rows.table.roots, &rows.table.children}) {
    for_each_head(rows, *group, shape, shape.forward_scratch(),
                  [&](const RuleRow& row, int64_t number, int64_t head, float* scratch) {
                    float* const own = states + (number * shape.n_keys + head) * size;
                    if (row.prefix >= 0) std::copy_n(states + (row.prefix * shape.n_keys + head) * size, size, own);
                    work(shape, given, row, head, own, blocks, outputs, scratch);
                  });
  }
}

template <typename scalar_t>
void backward(const RuleShape& shape, const RuleRows& rows, const RuleInputs<scalar_t>& given, const float* blocks,
              float* states, const RuleGrads<scalar_t>& grads) {
  using Work = void (*)(const RuleShape&, const RuleInputs<scalar_t>&, const RuleRow&, int64_t, const float*, float*,
                        const RuleGrads<scalar_t>&, float*);
  const auto work = best_isa<Work>(REALHF_ALL_ISAS(rule_backward));
  const int64_t size = shape.n_values * shape.state();
  const auto run = [&](const std::vector<int64_t>& group) {
    for_each_head(rows, group, shape, shape.backward_scratch(),
                  [&](const RuleRow& row, int64_t number, int64_t head, float* scratch) {
                    float* const own = states + number * size + head * shape.ratio() * shape.state();
                    work(shape, given, row, head, blocks, own, grads, scratch);
                  });
  };
  run(rows.table.children);
  for (const int64_t row : rows.table.children) {  // the states behind a prefix are those before the rows that continue it
    float *const own = states + row * size, *const of_prefix = states + rows.rows[row].prefix * size;
    for (int64_t i = 0; i < size; ++i) of_prefix[i] += own[i], own[i] = 0.0f;
  }
  run(rows.table.roots);
}

template <typename scalar_t>
RuleInputs<scalar_t> inputs_of(const Tensor& mixed, const Tensor& decay, const Tensor& rate, const float* slopes) {
  return {static_cast<const scalar_t*>(mixed.const_data_ptr()), decay.const_data_ptr<float>(),
          rate.const_data_ptr<float>(), slopes};
}

std::tuple<Tensor, Tensor, Tensor> delta_rule_cpu(const Tensor& mixed, const Tensor& decay, const Tensor& rate,
                                                  const Tensor& rows, const Tensor& states, bool saves) {
  const RuleRows all = rule_rows(rows);
  const RuleShape shape = checked_rule(mixed, decay, rate, states, all);
  const auto type = ScalarType::Float;
  Tensor outputs = torch::stable::new_empty(mixed, {all.table.tokens, shape.n_values, shape.value_dim}, type);
  Tensor ends = torch::stable::new_empty(states, {states.size(0), shape.n_values, shape.key_dim, shape.value_dim});
  Tensor blocks = torch::stable::new_empty(
      mixed, {saves ? all.blocks : 0, shape.n_values, shape.key_dim, shape.value_dim}, type);
  std::copy_n(states.const_data_ptr<float>(), states.numel(), ends.mutable_data_ptr<float>());
  float* const saved = saves ? blocks.mutable_data_ptr<float>() : nullptr;
  const auto run = [&](auto scalar) {
    using scalar_t = decltype(scalar);
    forward(shape, all, inputs_of<scalar_t>(mixed, decay, rate, nullptr), ends.mutable_data_ptr<float>(), saved,
            outputs.mutable_data_ptr<float>());
  };
  mixed.scalar_type() == type ? run(0.0f) : run(BFloat16{});
  return {outputs, ends, blocks};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> delta_rule_backward_cpu(const Tensor& grad, const Tensor& end_grad,
                                                                   const Tensor& mixed, const Tensor& decay,
                                                                   const Tensor& rate, const Tensor& rows,
                                                                   const Tensor& blocks) {
  const RuleRows all = rule_rows(rows);
  const RuleShape shape = checked_rule(mixed, decay, rate, end_grad, all);
  STD_TORCH_CHECK(grad.dim() == 3 && grad.size(0) == all.table.tokens && grad.size(1) == shape.n_values &&
                      grad.size(2) == shape.value_dim && grad.is_contiguous() && grad.scalar_type() == ScalarType::Float,
                  "delta_rule_backward: grad must be [T, Hv, dv] float32, contiguous");
  STD_TORCH_CHECK(blocks.dim() == 4 && blocks.size(0) == all.blocks && blocks.size(1) == shape.n_values &&
                      blocks.size(2) == shape.key_dim && blocks.size(3) == shape.value_dim && blocks.is_contiguous() &&
                      blocks.scalar_type() == ScalarType::Float,
                  "delta_rule_backward: blocks must be those of delta_rule");
  Tensor mixed_grad = torch::stable::new_empty(mixed, {all.table.tokens, shape.channels()});
  Tensor decay_grad = torch::stable::new_empty(decay, {all.table.tokens, shape.n_values});
  Tensor rate_grad = torch::stable::new_empty(rate, {all.table.tokens, shape.n_values});
  Tensor states = torch::stable::new_empty(end_grad, {end_grad.size(0), shape.n_values, shape.key_dim, shape.value_dim});
  std::copy_n(end_grad.const_data_ptr<float>(), end_grad.numel(), states.mutable_data_ptr<float>());
  const auto run = [&](auto scalar) {
    using scalar_t = decltype(scalar);
    backward(shape, all, inputs_of<scalar_t>(mixed, decay, rate, grad.const_data_ptr<float>()),
             blocks.const_data_ptr<float>(), states.mutable_data_ptr<float>(),
             RuleGrads<scalar_t>{static_cast<scalar_t*>(mixed_grad.mutable_data_ptr()),
                                 decay_grad.mutable_data_ptr<float>(), rate_grad.mutable_data_ptr<float>()});
  };
  mixed.scalar_type() == ScalarType::Float ? run(0.0f) : run(BFloat16{});
  return {mixed_grad, decay_grad, rate_grad, states};
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_FRAGMENT(realhf, library) {
  library.def(
      "delta_rule(Tensor mixed, Tensor decay, Tensor rate, Tensor rows, Tensor states, bool saves)"
      " -> (Tensor outputs, Tensor ends, Tensor blocks)");
  library.def(
      "delta_rule_backward(Tensor grad, Tensor end_grad, Tensor mixed, Tensor decay, Tensor rate, Tensor rows,"
      " Tensor blocks) -> (Tensor mixed_grad, Tensor decay_grad, Tensor rate_grad, Tensor states_grad)");
}

STABLE_TORCH_LIBRARY_IMPL(realhf, CPU, library) {
  library.impl("delta_rule", TORCH_BOX(&realhf::delta_rule_cpu));
  library.impl("delta_rule_backward", TORCH_BOX(&realhf::delta_rule_backward_cpu));
}
