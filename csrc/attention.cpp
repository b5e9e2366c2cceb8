// Causal attention over packed rows with shared prefixes, forward and backward: operator schemas and CPU kernels.
// realhf/ops/attention.py documents the operators; attention_rows.h computes one prefix group and one key/value head.
// Prefix groups are independent, so results do not depend on the number of threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "activations.h"
#include "arena.h"
#include "rope.h"

namespace realhf {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kRowsAtOnce = 64;    // query rows per block
constexpr int64_t kKeysAtOnce = 128;   // keys per block in the backward pass, which stores all scores of a block
constexpr int64_t kKeysForward = 128;  // keys per block in the forward pass, which stores kMaxRows rows of scores

constexpr int64_t padded(int64_t count) { return (count + kPadding - 1) / kPadding * kPadding; }

// Numbers of heads, of key/value heads and of query heads per key/value head; padded_dim: dim rounded up to vectors.
struct Heads {
  int64_t count, kv_count, group_size, dim, padded_dim;
};

struct Rule {
  float scale, softcap;
  int64_t window;
};

// Consecutive tokens; the first is at position `first`.
struct Segment {
  int64_t start, length, first;
};

// A row without prefix, and the rows that continue it.
struct PrefixGroup {
  Segment shared;
  const Segment* suffixes;
  int64_t n_suffixes;
  double cost;
};

template <typename scalar_t>
struct Inputs {
  const scalar_t *q, *k, *v, *grad, *out;
  const float* normalisers;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head;
};

template <typename scalar_t>
struct Outputs {
  scalar_t* out;
  float* normalisers;
};

template <typename scalar_t>
struct Gradients {
  scalar_t *q, *k, *v;
  int64_t token;
};

template <typename scalar_t>
struct Call {
  Inputs<scalar_t> in;
  Heads heads;
  Rule rule;
  Rope rope;
  Outputs<scalar_t> outputs;
  Gradients<scalar_t> gradients;
};

// Queries of one key/value head, ordered by token, then head; `first` is the position of the first token.
struct Block {
  int64_t rows, first, group_size;
  int64_t position(int64_t row) const { return first + row / group_size; }
};

// Float32 keys and values of a prefix and a segment: [padded_dim, across] if transposed, else [count, padded_dim].
struct Keys {
  float *k_transposed, *v_transposed, *k, *v, *k_grad, *v_grad;
  int64_t count, across;
};

// The buffers of one thread.
struct Scratch {
  float *q, *grad, *out, *shares, *slopes, *largest, *sums;
  Keys keys;
  std::unique_ptr<float[]> memory;

  Scratch(const Heads& heads, int64_t longest, bool backward) {
    static_assert(kPadding * kKeysForward <= kRowsAtOnce * kKeysAtOnce && kKeysForward % kKeysAtOnce == 0);
    const int64_t rows = std::max(kRowsAtOnce, heads.group_size) + kPadding;
    keys.across = padded(longest) + kPadding;  // the last vector may extend beyond the keys
    const int64_t size = keys.across * heads.padded_dim, more = backward ? size : 0;
    memory = aligned_buffers([&](const auto& take) {
      for (float** part : {&q, &grad, &out}) *part = take(rows * heads.padded_dim);
      for (float** part : {&shares, &slopes}) *part = take(rows * kKeysAtOnce);
      for (float** part : {&largest, &sums}) *part = take(rows);
      keys.k_transposed = take(size), keys.k = take(size), keys.v = take(backward ? 0 : size);
      for (float** part : {&keys.v_transposed, &keys.k_grad, &keys.v_grad}) *part = take(more);
    });
  }
};

#define REALHF_KERNEL_FILE "attention_rows.h"
#include "multi_isa.h"

template <typename scalar_t>
using Work = void (*)(const Call<scalar_t>&, const PrefixGroup&, int64_t, bool, Scratch&);

// The rows of a call, grouped by prefix.
struct PrefixGroups {
  std::vector<Segment> suffixes;
  std::vector<PrefixGroup> all;  // in order of decreasing cost, for load balance
  int64_t longest = 0;           // largest number of keys that a query sees

  PrefixGroups(const Tensor& rows, int64_t n_tokens) {
    STD_TORCH_CHECK(rows.dim() == 2 && rows.size(0) == 2 && rows.scalar_type() == ScalarType::Long &&
                        rows.is_contiguous() && rows.is_cpu(),
                    "packed_attention: rows must be [2, B] int64 on the CPU, contiguous");
    const int64_t n = rows.size(1);
    const int64_t *lengths = rows.const_data_ptr<int64_t>(), *prefixes = lengths + n;
    std::vector<int64_t> starts(n), order;
    int64_t total = 0;
    for (int64_t i = 0; i < n; ++i) {
      STD_TORCH_CHECK(lengths[i] >= 0 && lengths[i] <= n_tokens - total, "packed_attention: row ", i, " has ",
                      lengths[i], " tokens, q has ", n_tokens - total, " left");
      starts[i] = total, total += lengths[i];
      const int64_t prefix = prefixes[i];
      STD_TORCH_CHECK(prefix >= -1 && prefix < n && (prefix < 0 || prefixes[prefix] < 0), "packed_attention: row ", i,
                      " has prefix ", prefix, ", which is not a row without a prefix");
      if (prefix >= 0) order.push_back(i);
    }
    STD_TORCH_CHECK(total == n_tokens, "packed_attention: rows have ", total, " tokens in total, q has ", n_tokens);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return prefixes[a] < prefixes[b]; });
    for (int64_t i : order) {
      suffixes.push_back({starts[i], lengths[i], lengths[prefixes[i]]});
      longest = std::max(longest, lengths[prefixes[i]] + lengths[i]);
    }
    auto next = order.begin();
    for (int64_t i = 0; i < n; ++i) {
      if (prefixes[i] >= 0) continue;
      const auto first = next;
      double length = static_cast<double>(lengths[i]), cost = length * length;
      for (; next != order.end() && prefixes[*next] == i; ++next) {
        cost += static_cast<double>(lengths[*next]) * static_cast<double>(lengths[*next] + 2 * lengths[i]);
      }
      longest = std::max(longest, lengths[i]);
      if (cost > 0)
        all.push_back({{starts[i], lengths[i], 0}, suffixes.data() + (first - order.begin()), next - first, cost});
    }
    std::stable_sort(all.begin(), all.end(),
                     [](const PrefixGroup& a, const PrefixGroup& b) { return a.cost > b.cost; });
  }
};

template <typename scalar_t>
void work_through(const Call<scalar_t>& call, const PrefixGroups& prefix_groups, bool backward) {
  const auto work = best_isa<Work<scalar_t>>(REALHF_ALL_ISAS(group_attention));
  const int64_t n_items = static_cast<int64_t>(prefix_groups.all.size()) * call.heads.kv_count;
  const int64_t n_tasks = std::min<int64_t>(torch::stable::get_num_threads(), n_items);
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, n_tasks, 1, [&](int64_t, int64_t) {
    Scratch scratch(call.heads, prefix_groups.longest, backward);
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < n_items;) {
      work(call, prefix_groups.all[item / call.heads.kv_count], item % call.heads.kv_count, backward, scratch);
    }
  });
}

Tensor with_dense_heads(const Tensor& x) {
  return x.stride(2) == 1 || x.numel() == 0 ? x : torch::stable::contiguous(x);
}

void check_like(const char* name, const Tensor& given, const Tensor& q, int64_t heads) {
  STD_TORCH_CHECK(given.dim() == 3 && given.size(0) == q.size(0) && given.size(1) == heads &&
                      given.size(2) == q.size(2) && given.scalar_type() == q.scalar_type(),
                  "packed_attention: ", name, " must be [", q.size(0), ", ", heads, ", ", q.size(2), "], typed as q");
}

Heads checked_heads(const Tensor& q, const Tensor& k, const Tensor& v) {
  STD_TORCH_CHECK(q.dim() == 3 && k.dim() == 3, "packed_attention: q, k and v must be [T, heads, d]");
  STD_TORCH_CHECK(q.scalar_type() == ScalarType::Float || q.scalar_type() == ScalarType::BFloat16,
                  "packed_attention: q must be float32 or bfloat16");
  const int64_t count = q.size(1), kv_count = k.size(1);
  STD_TORCH_CHECK(kv_count > 0 && count > 0 && count % kv_count == 0, "packed_attention: ", count, " heads over ", kv_count);
  check_like("k", k, q, kv_count);
  check_like("v", v, q, kv_count);
  return {count, kv_count, count / kv_count, q.size(2), padded(q.size(2))};
}

template <typename scalar_t>
Call<scalar_t> call_of(const Tensor& q, const Tensor& k, const Tensor& v, const Heads& heads, const Rule& rule,
                       const Rope& rope) {
  Call<scalar_t> call{};
  call.heads = heads, call.rule = rule, call.rope = rope;
  call.in.q = static_cast<const scalar_t*>(q.const_data_ptr());
  call.in.q_token = q.stride(0), call.in.q_head = q.stride(1);
  call.in.k = static_cast<const scalar_t*>(k.const_data_ptr());
  call.in.k_token = k.stride(0), call.in.k_head = k.stride(1);
  call.in.v = static_cast<const scalar_t*>(v.const_data_ptr());
  call.in.v_token = v.stride(0), call.in.v_head = v.stride(1);
  return call;
}

template <typename scalar_t>
void forward(const Tensor& q, const Tensor& k, const Tensor& v, const PrefixGroups& prefix_groups, const Heads& heads,
             const Rule& rule, const Rope& rope, Tensor& out, Tensor& normalisers) {
  Call<scalar_t> call = call_of<scalar_t>(q, k, v, heads, rule, rope);
  call.outputs = {static_cast<scalar_t*>(out.mutable_data_ptr()), normalisers.mutable_data_ptr<float>()};
  work_through(call, prefix_groups, false);
}

Rope rope_of(const std::optional<Tensor>& angles, const Heads& heads, const PrefixGroups& prefix_groups) {
  const Rope rope = checked_rope(angles, heads.dim);
  STD_TORCH_CHECK(!angles || prefix_groups.longest <= rope.count, "packed_attention: a row of ", prefix_groups.longest,
                  " tokens, and angles of ", rope.count, " positions");
  return rope;
}

std::tuple<Tensor, Tensor> packed_attention_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& rows,
                                                const std::optional<Tensor>& angles, double scale, int64_t window,
                                                double softcap) {
  const Heads heads = checked_heads(q, k, v);
  const PrefixGroups prefix_groups(rows, q.size(0));
  const Rule rule{static_cast<float>(scale), static_cast<float>(softcap), std::min(window, prefix_groups.longest)};
  const Rope rope = rope_of(angles, heads, prefix_groups);
  Tensor out = torch::stable::new_empty(q, {q.size(0), heads.count, heads.dim});
  Tensor normalisers = torch::stable::new_empty(q, {q.size(0), heads.count}, ScalarType::Float);
  const auto run = q.scalar_type() == ScalarType::Float ? forward<float> : forward<BFloat16>;
  run(with_dense_heads(q), with_dense_heads(k), with_dense_heads(v), prefix_groups, heads, rule, rope, out,
      normalisers);
  return {out, normalisers};
}

template <typename scalar_t>
void backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
              const Tensor& normalisers, const PrefixGroups& prefix_groups, const Heads& heads, const Rule& rule,
              const Rope& rope, Tensor& result) {
  Call<scalar_t> call = call_of<scalar_t>(q, k, v, heads, rule, rope);
  call.in.grad = static_cast<const scalar_t*>(grad.const_data_ptr());
  call.in.grad_token = grad.stride(0), call.in.grad_head = grad.stride(1);
  call.in.out = static_cast<const scalar_t*>(out.const_data_ptr());
  call.in.normalisers = normalisers.const_data_ptr<float>();
  auto* const first = static_cast<scalar_t*>(result.mutable_data_ptr());
  scalar_t* const of_keys = first + heads.count * heads.dim;
  call.gradients = {first, of_keys, of_keys + heads.kv_count * heads.dim, result.size(1) * heads.dim};
  work_through(call, prefix_groups, true);
}

Tensor packed_attention_backward_cpu(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                                     const Tensor& out, const Tensor& normalisers, const Tensor& rows,
                                     const std::optional<Tensor>& angles, double scale, int64_t window,
                                     double softcap) {
  const Heads heads = checked_heads(q, k, v);
  check_like("grad", grad, q, heads.count);
  check_like("out", out, q, heads.count);
  STD_TORCH_CHECK(out.is_contiguous() && normalisers.is_contiguous() && normalisers.numel() == q.size(0) * heads.count,
                  "packed_attention_backward: out and normalisers must be what packed_attention returned");
  const PrefixGroups prefix_groups(rows, q.size(0));
  const Rule rule{static_cast<float>(scale), static_cast<float>(softcap), std::min(window, prefix_groups.longest)};
  const Rope rope = rope_of(angles, heads, prefix_groups);
  Tensor result = torch::stable::new_empty(q, {q.size(0), heads.count + 2 * heads.kv_count, heads.dim});
  const auto run = q.scalar_type() == ScalarType::Float ? backward<float> : backward<BFloat16>;
  run(with_dense_heads(grad), with_dense_heads(q), with_dense_heads(k), with_dense_heads(v), out, normalisers,
      prefix_groups, heads, rule, rope, result);
  return result;
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_FRAGMENT(realhf, library) {
  library.def(
      "packed_attention(Tensor q, Tensor k, Tensor v, Tensor rows, Tensor? angles, float scale, int window,"
      " float softcap) -> (Tensor out, Tensor normalisers)");
  library.def(
      "packed_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor normalisers,"
      " Tensor rows, Tensor? angles, float scale, int window, float softcap) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(realhf, CPU, library) {
  library.impl("packed_attention", TORCH_BOX(&realhf::packed_attention_cpu));
  library.impl("packed_attention_backward", TORCH_BOX(&realhf::packed_attention_backward_cpu));
}
