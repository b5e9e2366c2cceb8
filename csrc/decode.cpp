// One decoding step through all blocks of a stage with a KV cache: operator schema and CPU kernel.
// realhf/models/fused_decode.py documents the operator; decode_rows.h computes a range of rows. A thread takes its rows
// through all blocks without synchronisation and computes in float32 for every weight type.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "activations.h"
#include "arena.h"
#include "rope.h"
#include "tiles.h"

namespace realhf {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kRowsAtOnce = 128;       // rows per pass over the weights
constexpr int64_t kMinRowsPerThread = 12;  // fewer rows do not repay a thread
constexpr int64_t kRowsPerGroup = 16;      // rows that attend to a shared prefix together
constexpr int64_t kTensorsPerLayer = 16;
constexpr int64_t kMaxSize = 1 << 20;  // of given sizes, whose products must not overflow

constexpr int64_t padded(int64_t count) { return (count + kPadding - 1) / kPadding * kPadding; }

struct Shape {
  int64_t hidden, n_q, n_kv, dim, inner, max_len, growth_period;
  Activation activation;
  bool gated, parallel, layer_norms;
  float eps, residual_scale, scale, softcap, query_growth;

  int64_t place(int64_t row, int64_t head, int64_t position) const {
    return ((row * n_kv + head) * max_len + position) * dim;
  }
};

template <typename scalar_t>
struct Norm {
  const scalar_t *weight, *bias;
  float offset;
  bool is_layer_norm;
};

template <typename scalar_t>
struct Layer {
  Norm<scalar_t> norm, q_norm, k_norm, post_norm, mlp_norm, mlp_post_norm;
  Matrix<scalar_t> qkv, out, up, down;
  scalar_t *keys, *values;  // [rows, n_kv, max_len, dim]
  int64_t window;
  Rope rope;
};

template <typename scalar_t>
struct Stage {
  const Layer<scalar_t>* layers;
  int64_t n_layers;
  Norm<scalar_t> final_norm;
  const scalar_t* x;
  const int64_t *positions, *prefixes;
  scalar_t* result;
};

// Rows whose first `shared` tokens are equal and cached in row `holder`; `longest` is the length of the longest row.
struct PrefixGroup {
  const int64_t* rows;
  int64_t n_rows, shared, longest, holder;
};

// The buffers of one thread.
struct Buffers {
  float *x, *inner, *mixed, *gemm, *projected, *scores, *queries, *heads, *sums;
  std::unique_ptr<float[]> memory;
  std::vector<int64_t> order;
  std::vector<PrefixGroup> prefix_groups;

  Buffers(const Shape& shape, int64_t rows) {
    const int64_t of_mixed = shape.n_q * shape.dim, of_qkv = of_mixed + 2 * shape.n_kv * shape.dim;
    const int64_t projected_size = std::max(of_qkv, shape.inner * (shape.gated ? 2 : 1));
    const int64_t group_size = std::min(kRowsPerGroup, rows) * (shape.n_q / shape.n_kv);
    memory = aligned_buffers([&](const auto& take) {
      for (float** part : {&x, &inner, &gemm}) *part = take(rows * shape.hidden);
      mixed = take(rows * of_mixed), projected = take(rows * projected_size);
      scores = take(group_size * padded(shape.max_len)), sums = take(group_size);
      for (float** part : {&queries, &heads}) *part = take(group_size * shape.dim);
    });
  }

  // Groups rows first..first+count by prefix; `prefixes` [3, S] are group numbers, shared lengths and holders.
  void find_groups(int64_t first, int64_t count, const int64_t* positions, const int64_t* prefixes, int64_t n_rows) {
    order.resize(count), prefix_groups.clear();
    std::iota(order.begin(), order.end(), first);
    if (prefixes) {
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return prefixes[a] < prefixes[b]; });
    }
    for (const int64_t& row : order) {
      const bool is_linked = prefixes && !prefix_groups.empty() && prefix_groups.back().n_rows < kRowsPerGroup &&
                             prefixes[prefix_groups.back().rows[0]] == prefixes[row];
      const int64_t shared = prefixes ? prefixes[n_rows + row] : 0;
      if (!is_linked) prefix_groups.push_back({&row, 0, shared, 0, prefixes ? prefixes[2 * n_rows + row] : row});
      PrefixGroup& prefix_group = prefix_groups.back();
      prefix_group.shared = std::min(prefix_group.shared, shared),
      prefix_group.longest = std::max(prefix_group.longest, positions[row] + 1);
      ++prefix_group.n_rows;
    }
  }
};

#define REALHF_KERNEL_FILE "decode_rows.h"
#include "multi_isa.h"

// Reads the tensors of a stage in order and checks their sizes; an empty tensor means none.
template <typename scalar_t>
class Reader {
 public:
  Reader(const std::vector<Tensor>& all, float offset, bool layer_norms)
      : next_(all.begin()), offset_(offset), layer_norms_(layer_norms) {}

  const scalar_t* take(int64_t size) {
    const Tensor& given = *next_++;
    if (given.numel() == 0) return nullptr;
    STD_TORCH_CHECK(given.numel() == size && given.is_contiguous(), "decode_blocks: a weight of ", given.numel(),
                    " elements where ", size, " are expected, contiguous");
    return static_cast<const scalar_t*>(given.const_data_ptr());
  }

  Norm<scalar_t> norm(int64_t size) {  // over hidden states
    const scalar_t *weight = take(size), *bias = take(size);
    return {weight, bias, offset_, layer_norms_};
  }

  Norm<scalar_t> rms_norm(int64_t size) { return {take(size), nullptr, offset_, false}; }

  Matrix<scalar_t> matrix(int64_t outs, int64_t depth) {
    const scalar_t* tiles = take(outs * depth);
    STD_TORCH_CHECK(tiles != nullptr, "decode_blocks: a matrix is missing");
    return {tiles, take(outs), outs, depth};
  }

 private:
  std::vector<Tensor>::const_iterator next_;
  float offset_;
  bool layer_norms_;
};

template <typename scalar_t>
Layer<scalar_t> read_layer(Reader<scalar_t>& reader, const Shape& shape) {
  const int64_t hidden = shape.hidden, of_q = shape.n_q * shape.dim;
  Layer<scalar_t> layer{};
  layer.norm = reader.norm(hidden);
  layer.qkv = reader.matrix(of_q + 2 * shape.n_kv * shape.dim, hidden);
  layer.q_norm = reader.rms_norm(shape.dim);
  layer.k_norm = reader.rms_norm(shape.dim);
  layer.out = reader.matrix(hidden, of_q);
  layer.post_norm = reader.rms_norm(hidden);
  layer.mlp_norm = reader.norm(hidden);
  layer.up = reader.matrix(shape.gated ? 2 * shape.inner : shape.inner, hidden);
  layer.down = reader.matrix(hidden, shape.inner);
  layer.mlp_post_norm = reader.rms_norm(hidden);
  STD_TORCH_CHECK(layer.norm.weight && layer.mlp_norm.weight, "decode_blocks: a norm is missing");
  return layer;
}

template <typename scalar_t>
void run(const Shape& shape, const std::vector<Tensor>& weights, const std::vector<Rope>& ropes,
         const std::vector<int64_t>& windows, float offset, Tensor& k, Tensor& v, const Tensor& x,
         const Tensor& positions, const std::optional<Tensor>& prefixes, Tensor& result) {
  Reader<scalar_t> reader(weights, offset, shape.layer_norms);
  std::vector<Layer<scalar_t>> layers;
  const int64_t of_layer = k.size(1) * shape.n_kv * shape.max_len * shape.dim;
  for (size_t i = 0; i < windows.size(); ++i) {
    layers.push_back(read_layer(reader, shape));
    layers[i].keys = static_cast<scalar_t*>(k.mutable_data_ptr()) + i * of_layer;
    layers[i].values = static_cast<scalar_t*>(v.mutable_data_ptr()) + i * of_layer;
    layers[i].window = windows[i], layers[i].rope = ropes[i];
  }
  const Stage<scalar_t> stage{layers.data(),
                              static_cast<int64_t>(layers.size()),
                              reader.norm(shape.hidden),
                              static_cast<const scalar_t*>(x.const_data_ptr()),
                              positions.const_data_ptr<int64_t>(),
                              prefixes ? prefixes->const_data_ptr<int64_t>() : nullptr,
                              static_cast<scalar_t*>(result.mutable_data_ptr())};
  using Work = void (*)(const Shape&, const Stage<scalar_t>&, int64_t, int64_t, Buffers&);
  const auto work = best_isa<Work>(REALHF_ALL_ISAS(run_stage));
  const int64_t n_rows = x.size(0), n_threads = torch::stable::get_num_threads();
  const int64_t share = std::max(kMinRowsPerThread, (n_rows + n_threads - 1) / n_threads);
  torch::stable::parallel_for(0, (n_rows + share - 1) / share, 1, [&](int64_t from, int64_t to) {
    const int64_t stop = std::min(n_rows, to * share);
    Buffers buffers(shape, std::min(kRowsAtOnce, stop - from * share));
    for (int64_t row = from * share; row < stop; row += kRowsAtOnce) {
      const int64_t count = std::min(kRowsAtOnce, stop - row);
      buffers.find_groups(row, count, stage.positions, stage.prefixes, n_rows);
      work(shape, stage, row, count, buffers);
    }
  });
}

void check_rows(const Tensor& positions, const std::optional<Tensor>& prefixes, int64_t n_rows, int64_t limit,
                bool has_windows) {
  STD_TORCH_CHECK(positions.dim() == 1 && positions.size(0) == n_rows && positions.is_contiguous() &&
                      positions.scalar_type() == ScalarType::Long,
                  "decode_blocks: positions must be [", n_rows, "] int64, contiguous");
  STD_TORCH_CHECK(!prefixes || (prefixes->dim() == 2 && prefixes->size(0) == 3 && prefixes->size(1) == n_rows &&
                                prefixes->is_contiguous() && prefixes->scalar_type() == ScalarType::Long),
                  "decode_blocks: prefixes must be [3, ", n_rows, "] int64, contiguous");
  const int64_t *all = positions.const_data_ptr<int64_t>(),
                *shared = prefixes ? prefixes->const_data_ptr<int64_t>() + n_rows : nullptr;
  for (int64_t i = 0; i < n_rows; ++i) {
    STD_TORCH_CHECK(all[i] >= 0 && all[i] < limit, "decode_blocks: position ", all[i], " of ", limit);
    STD_TORCH_CHECK(!shared || (shared[i] >= 0 && shared[i] <= all[i]), "decode_blocks: row ", i, " at position ",
                    all[i], " shares ", shared ? shared[i] : 0, " tokens");
    const int64_t holder = shared ? shared[n_rows + i] : i;
    STD_TORCH_CHECK(holder == i || (holder >= 0 && holder < n_rows && !has_windows), "decode_blocks: row ", i,
                    " cannot read what row ", holder, " holds");
  }
}

Shape checked_shape(const Tensor& x, const Tensor& k, const Tensor& v, int64_t n_heads, int64_t inner) {
  STD_TORCH_CHECK(x.dim() == 2 && k.dim() == 5 && x.is_contiguous() && k.is_contiguous() && v.is_contiguous() &&
                      v.numel() == k.numel() && k.size(1) >= x.size(0),
                  "decode_blocks: x must be [S, D], k and v [L, slots >= S, K, max_len, d], contiguous");
  STD_TORCH_CHECK(x.scalar_type() == k.scalar_type() && x.scalar_type() == v.scalar_type() &&
                      (x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16),
                  "decode_blocks: x, k and v must be float32 or bfloat16, all alike");
  Shape shape{};
  shape.hidden = x.size(1), shape.n_q = n_heads, shape.n_kv = k.size(2), shape.max_len = k.size(3);
  shape.dim = k.size(4), shape.inner = inner;
  STD_TORCH_CHECK(shape.n_kv > 0 && n_heads > 0 && n_heads <= kMaxSize && n_heads % shape.n_kv == 0, "decode_blocks: ", n_heads, " heads over ", shape.n_kv);
  for (const int64_t size : {shape.hidden, shape.dim, inner}) {
    STD_TORCH_CHECK(size > 0 && size <= kMaxSize && size % kPadding == 0, "decode_blocks: size ", size,
                    " is no multiple of ", kPadding, " up to ", kMaxSize);
  }
  return shape;
}

// The rotation of every layer; `table_of` has the number of its table, or -1.
std::vector<Rope> ropes_of(const std::vector<Tensor>& angles, const std::vector<int64_t>& table_of, int64_t dim) {
  std::vector<Rope> ropes;
  for (const int64_t table : table_of) {
    STD_TORCH_CHECK(table >= -1 && table < static_cast<int64_t>(angles.size()), "decode_blocks: table ", table, " of ",
                    angles.size());
    ropes.push_back(table < 0 ? Rope{nullptr, 0, 0} : checked_rope(angles[table], dim));
  }
  return ropes;
}

Tensor decode_blocks_cpu(const Tensor& x, std::vector<Tensor> weights, Tensor k, Tensor v, const Tensor& positions,
                         const std::optional<Tensor>& prefixes, std::vector<Tensor> angles,
                         std::vector<int64_t> table_of, std::vector<int64_t> windows, int64_t n_heads, int64_t inner,
                         int64_t activation, bool gated, bool parallel, bool layer_norms, double eps, double offset,
                         double residual_scale, double scale, double softcap, double query_growth,
                         int64_t growth_period) {
  Shape shape = checked_shape(x, k, v, n_heads, inner);
  STD_TORCH_CHECK(static_cast<int64_t>(windows.size()) == k.size(0) && table_of.size() == windows.size() &&
                      weights.size() == windows.size() * kTensorsPerLayer + 2,
                  "decode_blocks: ", weights.size(), " weights, ", windows.size(), " windows and ", table_of.size(),
                  " tables of ", k.size(0), " layers");
  STD_TORCH_CHECK(query_growth == 0 || growth_period > 0, "decode_blocks: growth_period ", growth_period);
  for (const Tensor& given : weights) {
    STD_TORCH_CHECK(given.scalar_type() == x.scalar_type(), "decode_blocks: weights must be typed as x");
  }
  const std::vector<Rope> ropes = ropes_of(angles, table_of, shape.dim);
  int64_t limit = shape.max_len;
  for (const Rope& rope : ropes) limit = rope.angles ? std::min(limit, rope.count) : limit;
  const bool has_windows = std::any_of(windows.begin(), windows.end(), [](int64_t window) { return window > 0; });
  check_rows(positions, prefixes, x.size(0), limit, has_windows);
  STD_TORCH_CHECK(activation >= 0 && activation <= 2, "decode_blocks: activation ", activation);
  shape.activation = static_cast<Activation>(activation), shape.gated = gated, shape.parallel = parallel;
  shape.layer_norms = layer_norms, shape.eps = static_cast<float>(eps), shape.scale = static_cast<float>(scale);
  shape.softcap = static_cast<float>(softcap), shape.residual_scale = static_cast<float>(residual_scale);
  shape.query_growth = static_cast<float>(query_growth), shape.growth_period = growth_period;
  Tensor result = torch::stable::new_empty(x, {x.size(0), x.size(1)});
  const auto all = x.scalar_type() == ScalarType::Float ? run<float> : run<BFloat16>;
  if (x.size(0) > 0) {
    all(shape, weights, ropes, windows, static_cast<float>(offset), k, v, x, positions, prefixes, result);
  }
  return result;
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_FRAGMENT(realhf, library) {
  library.def(
      "decode_blocks(Tensor x, Tensor[] weights, Tensor(a!) k, Tensor(b!) v, Tensor positions, Tensor? prefixes,"
      " Tensor[] angles, int[] table_of, int[] windows, int n_heads, int inner, int activation, bool gated,"
      " bool parallel, bool layer_norms, float eps, float offset, float residual_scale, float scale, float softcap,"
      " float query_growth, int growth_period) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(realhf, CPU, library) {
  library.impl("decode_blocks", TORCH_BOX(&realhf::decode_blocks_cpu));
}
