// One decoding step through all blocks of a stage with a KV cache: operator schema and CPU kernel.
// realhf/models/fused/fused_blocks.py documents the operator; decode_rows.h computes a range of rows, in float32 for every
// weight type. A thread takes its rows through all blocks without synchronisation; of few rows, threads divide products
// and heads instead, so that they read the weights once. Results are the same bits.
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
#include "bf16_dot.h"
#include "rope.h"
#include "sampling_row.h"
#include "tiles.h"

namespace realhf {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#include "decode_types.h"

#define REALHF_KERNEL_FILE "decode_rows.h"
#include "multi_isa.h"

#include "decode_arguments.h"
#include "decode_steps.h"

// The blocks of a call: their weights, with one rotation, window and kind of MLP each.
struct BlockList {
  const std::vector<Tensor>& weights;
  std::vector<Rope> ropes;
  const std::vector<int64_t>&windows, &routed;
  float offset;

  int64_t n_routed() const {
    return std::count_if(routed.begin(), routed.end(), [](int64_t is) { return is != 0; });
  }
};

// The tensors of a step beside the weights.
struct Inputs {
  const Tensor &x, &positions;
  const std::optional<Tensor>&prefixes, &slots;
  Tensor &k, &v;
  int64_t* chosen;  // [routed layers, S, top_k], or null
};

void run_alone(int64_t count, void (*work)(void*, int64_t), void* given) {
  for (int64_t part = 0; part < count; ++part) work(given, part);
}

void run_together(int64_t count, void (*work)(void*, int64_t), void* given) {
  torch::stable::parallel_for(0, count, 1, [&](int64_t from, int64_t to) {
    for (int64_t part = from; part < to; ++part) work(given, part);
  });
}

// How many threads divide the products of all rows; 1 if they divide the rows, where each of them reads all weights. These
// come from memory if they exceed the caches, and few rows would not use all threads.
template <typename scalar_t>
int64_t team_size(const std::vector<Layer<scalar_t>>& layers, int64_t n_rows, int64_t n_threads) {
  const Layer<scalar_t>& last = layers.back();  // the first ones of a routed model may be dense
  int64_t size = 0, n_bytes = 0;
  for (const Matrix<scalar_t>* matrix : {&last.qkv, &last.out, &last.up, &last.down}) {
    size += matrix->outs * matrix->depth, n_bytes += matrix->outs / kPadding * matrix->tile_bytes();
  }
  const int64_t most = std::min(n_threads, size / kMinPartElements);
  const bool is_large = n_bytes * static_cast<int64_t>(layers.size()) > kCacheBytes;
  return most > 1 && (is_large || n_rows < 2 * kMinRowsPerThread * most) ? most : 1;
}

template <typename scalar_t>
std::vector<Layer<scalar_t>> read_layers(Reader<scalar_t>& reader, const Shape& shape, const BlockList& blocks, Tensor& k,
                                         Tensor& v, int64_t* chosen, int64_t n_rows) {
  std::vector<Layer<scalar_t>> layers;
  const int64_t of_layer = k.size(1) * shape.n_kv * shape.max_len * shape.dim * (shape.has_bf16_cache ? 2 : 4);
  for (size_t i = 0; i < blocks.windows.size(); ++i) {
    Layer<scalar_t>& layer = layers.emplace_back();
    layer.is_routed = blocks.routed[i] != 0, layer.window = blocks.windows[i], layer.rope = blocks.ropes[i];
    layer.keys = static_cast<char*>(k.mutable_data_ptr()) + i * of_layer;
    layer.values = static_cast<char*>(v.mutable_data_ptr()) + i * of_layer;
    if (shape.sublayers != Sublayers::mlp) read_attention(reader, shape, layer);
    if (shape.sublayers == Sublayers::attention) continue;
    read_mlp(reader, shape, layer);
    if (layer.is_routed && chosen) layer.chosen = chosen, chosen += n_rows * shape.routing.top_k;
  }
  return layers;
}

template <typename scalar_t>
using RunStage = void (*)(const Shape&, const Stage<scalar_t>&, int64_t, int64_t, Buffers&);

// Calls `run_rows(from, stop, team)` for all rows: of one team, or of a thread each. `start_of(row)` may move the start
// of a thread's rows.
template <typename scalar_t, typename RunRows, typename StartOf>
void divide_rows(const std::vector<Layer<scalar_t>>& layers, int64_t n_rows, const RunRows& run_rows,
                 const StartOf& start_of) {
  const int64_t n_threads = torch::stable::get_num_threads(), n_team = team_size(layers, n_rows, n_threads);
  if (n_team > 1) return run_rows(0, n_rows, Team{n_team, run_together});
  const int64_t share = std::max(kMinRowsPerThread, (n_rows + n_threads - 1) / n_threads);
  torch::stable::parallel_for(0, (n_rows + share - 1) / share, 1, [&](int64_t from, int64_t to) {
    run_rows(start_of(std::min(n_rows, from * share)), start_of(std::min(n_rows, to * share)), Team{1, run_alone});
  });
}

template <typename scalar_t>
void run(const Shape& shape, const BlockList& blocks, const Inputs& inputs, Tensor& result) {
  const auto& [x, positions, prefixes, slots, k, v, chosen] = inputs;
  const int64_t n_rows = x.size(0);
  Reader<scalar_t> reader(blocks.weights, blocks.offset, shape.layer_norms);
  const auto layers = read_layers(reader, shape, blocks, k, v, chosen, n_rows);
  const Stage<scalar_t> stage{layers.data(),
                              static_cast<int64_t>(layers.size()),
                              shape.sublayers == Sublayers::both ? reader.norm(shape.hidden) : Norm<scalar_t>{},
                              static_cast<const scalar_t*>(x.const_data_ptr()),
                              positions.const_data_ptr<int64_t>(),
                              prefixes ? prefixes->const_data_ptr<int64_t>() : nullptr,
                              slots ? slots->const_data_ptr<int64_t>() : nullptr,
                              static_cast<scalar_t*>(result.mutable_data_ptr())};
  const auto work = best_isa<RunStage<scalar_t>>(REALHF_ALL_ISAS(run_stage));
  const auto run_rows = [&](int64_t from, int64_t stop, const Team& team) {
    Buffers buffers(shape, std::min(kRowsAtOnce, stop - from), team);
    for (int64_t row = from; row < stop; row += kRowsAtOnce) {
      const int64_t count = std::min(kRowsAtOnce, stop - row);
      if (shape.sublayers != Sublayers::mlp) {
        buffers.find_groups(row, count, stage.positions, stage.prefixes, stage.slots, n_rows);
      }
      work(shape, stage, row, count, buffers);
    }
  };
  divide_rows(layers, n_rows, run_rows, [&](int64_t row) {  // rows of a slot need each other's keys: one thread has them
    while (stage.slots && row > 0 && row < n_rows && stage.slots[row] == stage.slots[row - 1]) ++row;
    return row;
  });
}

// The model that the arguments of both operators describe, beside its sizes.
Shape described(Shape shape, int64_t activation, bool gated, bool parallel, bool layer_norms, bool has_gates,
                bool norms_projections, double eps, double residual_scale, double scale, double softcap,
                double query_growth, int64_t growth_period) {
  STD_TORCH_CHECK(query_growth == 0 || growth_period > 0, "decode_blocks: growth_period ", growth_period);
  STD_TORCH_CHECK(activation >= 0 && activation <= 3 && (activation < 3 || gated), "decode_blocks: activation ",
                  activation);
  shape.activation = static_cast<Activation>(activation), shape.gated = gated, shape.parallel = parallel;
  shape.layer_norms = layer_norms, shape.has_gates = has_gates, shape.norms_projections = norms_projections;
  shape.eps = static_cast<float>(eps), shape.scale = static_cast<float>(scale);
  shape.softcap = static_cast<float>(softcap), shape.residual_scale = static_cast<float>(residual_scale);
  shape.query_growth = static_cast<float>(query_growth), shape.growth_period = growth_period;
  return shape;
}

Tensor decode_blocks_cpu(const Tensor& x, std::vector<Tensor> weights, Tensor k, Tensor v, const Tensor& positions,
                         const std::optional<Tensor>& prefixes, const std::optional<Tensor>& slots,
                         std::vector<Tensor> angles,
                         std::vector<int64_t> table_of, std::vector<int64_t> windows, std::vector<int64_t> routed,
                         std::vector<int64_t> routing, std::optional<Tensor> chosen, int64_t sublayers,
                         int64_t n_heads, int64_t inner, int64_t activation, bool gated, bool parallel,
                         bool layer_norms, bool has_gates, bool norms_projections, double eps, double offset,
                         double residual_scale, double scale, double softcap, double query_growth,
                         int64_t growth_period, double expert_scale) {
  STD_TORCH_CHECK(sublayers >= 0 && sublayers <= 2, "decode_blocks: sublayers ", sublayers);
  Shape shape = checked_shape(x, k, v, n_heads, inner, static_cast<Sublayers>(sublayers));
  shape.routing = checked_routing(routing, expert_scale);
  check_layers(weights, windows, routed, table_of, k, shape);
  shape = described(shape, activation, gated, parallel, layer_norms, has_gates, norms_projections, eps, residual_scale,
                    scale, softcap, query_growth, growth_period);
  BlockList blocks{weights, std::vector<Rope>(windows.size()), windows, routed, static_cast<float>(offset)};
  if (shape.sublayers != Sublayers::mlp) {
    blocks.ropes = ropes_of(angles, table_of, shape.dim);
    STD_TORCH_CHECK(slots || k.size(1) >= x.size(0), "decode_blocks: ", x.size(0), " rows of ", k.size(1), " slots");
    STD_TORCH_CHECK(positions.dim() == 1 && positions.size(0) == x.size(0) && positions.is_contiguous() &&
                        positions.scalar_type() == ScalarType::Long,
                    "decode_blocks: positions must be [", x.size(0), "] int64, contiguous");
    check_rows(positions.const_data_ptr<int64_t>(), prefixes, x.size(0), limit_of(shape, blocks.ropes), has_windows(windows));
    if (slots) check_slots(*slots, positions, k.size(1), prefixes.has_value());
  }
  const Inputs inputs{x, positions, prefixes, slots, k, v, checked_chosen(chosen, blocks.n_routed(), x.size(0), shape.routing.top_k)};
  Tensor result = torch::stable::new_empty(x, {x.size(0), x.size(1)});
  if (x.size(0) > 0) (x.scalar_type() == ScalarType::Float ? run<float> : run<BFloat16>)(shape, blocks, inputs, result);
  return result;
}

// The rows of `state`, [6, S]: last token, position, prompt number, sample, token count, limit of the count.
std::vector<LiveRow> checked_state(const Tensor& state, int64_t n_steps, int64_t n_tokens, int64_t n_slots, int64_t limit) {
  STD_TORCH_CHECK(state.dim() == 2 && state.size(0) == 6 && state.is_contiguous() && state.scalar_type() == ScalarType::Long &&
                      state.size(1) <= n_slots,
                  "decode_steps: state must be [6, S <= ", n_slots, "] int64, contiguous");
  const int64_t n_rows = state.size(1), *all = state.const_data_ptr<int64_t>();
  std::vector<LiveRow> rows;
  for (int64_t i = 0; i < n_rows; ++i) {
    const auto at = [&](int64_t column) { return all[column * n_rows + i]; };
    const LiveRow& row = rows.emplace_back(LiveRow{i, at(0), at(1), at(2), at(3), at(4), at(5)});
    STD_TORCH_CHECK(row.token >= 0 && row.token < n_tokens, "decode_steps: token ", row.token, " of ", n_tokens);
    STD_TORCH_CHECK(row.position >= 0 && row.count >= 0 && row.limit > row.count,
                    "decode_steps: row ", i, " at position ", row.position, " has ", row.count, " of ", row.limit, " tokens");
    const int64_t steps = std::min(n_steps, row.limit - row.count);
    STD_TORCH_CHECK(row.position <= limit - steps, "decode_steps: row ", i, " makes ", steps, " steps from position ",
                    row.position, " of ", limit);
  }
  return rows;
}

template <typename scalar_t>
Ends<scalar_t> checked_ends(const Tensor& embed, const std::optional<Tensor>& of_positions, const Tensor& head,
                            const Tensor& stops, int64_t vocab) {
  const ScalarType type = embed.scalar_type();
  STD_TORCH_CHECK(!of_positions || (of_positions->dim() == 2 && of_positions->size(1) == embed.size(1) &&
                                    of_positions->is_contiguous() && of_positions->scalar_type() == type),
                  "decode_steps: of_positions must be [P, ", embed.size(1), "], contiguous, of the type of embed");
  STD_TORCH_CHECK(vocab > 0 && vocab <= embed.size(0) && head.dim() == 3 && head.is_contiguous() &&
                      head.size(0) == (vocab - 1) / kPadding + 1 && head.size(1) == embed.size(1) &&
                      head.size(2) == kPadding && head.scalar_type() == type,
                  "decode_steps: head must be tiles of [", vocab, ", ", embed.size(1), "], of the type of embed");
  STD_TORCH_CHECK(stops.dim() == 1 && stops.is_contiguous() && stops.scalar_type() == ScalarType::Long,
                  "decode_steps: stops must be [n] int64, contiguous");
  Ends<scalar_t> ends{};
  ends.embed = static_cast<const scalar_t*>(embed.const_data_ptr());
  ends.of_positions = of_positions ? static_cast<const scalar_t*>(of_positions->const_data_ptr()) : nullptr;
  const TileType tiles = type == ScalarType::Float ? TileType::float32 : TileType::bfloat16;
  ends.head = {static_cast<const char*>(head.const_data_ptr()), tiles, nullptr, padded(vocab), embed.size(1)};
  ends.vocab = vocab, ends.stops = stops.const_data_ptr<int64_t>(), ends.n_stops = stops.numel();
  return ends;
}

struct StepOptions {
  int64_t n_steps, vocab, seed, min_count, top_k;
  double temperature, top_p, first_scale, second_scale, logit_scale;
};

template <typename scalar_t>
void run_steps(const Shape& shape, const BlockList& blocks, const std::vector<LiveRow>& rows, const Tensor& embed,
               const std::optional<Tensor>& of_positions, const Tensor& head, const Tensor& stops,
               const std::optional<Tensor>& prefixes, const StepOptions& options, Tensor& k, Tensor& v, double* out) {
  Ends<scalar_t> ends = checked_ends<scalar_t>(embed, of_positions, head, stops, options.vocab);
  ends.scales[0] = static_cast<float>(options.first_scale), ends.scales[1] = static_cast<float>(options.second_scale);
  ends.logit_scale = static_cast<float>(options.logit_scale);
  ends.seed = options.seed, ends.min_count = options.min_count;
  ends.rule = {static_cast<float>(options.temperature), options.top_k < options.vocab ? options.top_k : 0, options.top_p,
               ends.stops, ends.n_stops};
  for (int64_t i = 0; i < (ends.min_count > 0 ? ends.n_stops : 0); ++i) {
    STD_TORCH_CHECK(ends.stops[i] >= 0 && ends.stops[i] < ends.vocab, "decode_steps: token ", ends.stops[i],
                    " is forbidden, but the vocabulary has ", ends.vocab);
  }
  Reader<scalar_t> reader(blocks.weights, blocks.offset, shape.layer_norms);
  const auto layers = read_layers(reader, shape, blocks, k, v, nullptr, 0);
  Stage<scalar_t> stage{};
  stage.layers = layers.data(), stage.n_layers = layers.size(), stage.final_norm = reader.norm(shape.hidden);
  stage.prefixes = prefixes ? prefixes->const_data_ptr<int64_t>() : nullptr;
  const auto of_blocks = best_isa<RunStage<scalar_t>>(REALHF_ALL_ISAS(run_stage));
  const auto product = best_isa<typename RowSteps<scalar_t>::Product>(REALHF_ALL_ISAS(tiled_gemm<scalar_t>));
  const auto run_rows = [&](int64_t from, int64_t stop, const Team& team) {
    std::vector<LiveRow> own(rows.begin() + from, rows.begin() + stop);
    RowSteps<scalar_t>(shape, stage, ends, of_blocks, product, std::move(own), rows.size(), team)
        .run(options.n_steps, out);
  };
  divide_rows(layers, rows.size(), run_rows, [](int64_t row) { return row; });
}

// [n_steps, 3, S] float64: tokens (kSkipped after a row's end) and two log-probabilities.
Tensor decode_steps_cpu(const Tensor& state, const Tensor& embed, const std::optional<Tensor>& of_positions,
                        const Tensor& head, const Tensor& stops, int64_t n_steps, int64_t vocab, int64_t seed,
                        int64_t min_count, double temperature, int64_t top_k, double top_p, double first_scale,
                        double second_scale, double logit_scale, std::vector<Tensor> weights, Tensor k, Tensor v,
                        const std::optional<Tensor>& prefixes, std::vector<Tensor> angles, std::vector<int64_t> table_of,
                        std::vector<int64_t> windows, std::vector<int64_t> routed, std::vector<int64_t> routing,
                        int64_t n_heads, int64_t inner, int64_t activation, bool gated, bool parallel, bool layer_norms,
                        bool has_gates, bool norms_projections, double eps, double offset, double residual_scale,
                        double scale, double softcap, double query_growth, int64_t growth_period, double expert_scale) {
  Shape shape = checked_shape(embed, k, v, n_heads, inner, Sublayers::both);
  shape.routing = checked_routing(routing, expert_scale);
  check_layers(weights, windows, routed, table_of, k, shape);
  shape = described(shape, activation, gated, parallel, layer_norms, has_gates, norms_projections, eps, residual_scale,
                    scale, softcap, query_growth, growth_period);
  STD_TORCH_CHECK(n_steps > 0 && n_steps <= shape.max_len, "decode_steps: ", n_steps, " steps of ", shape.max_len);
  STD_TORCH_CHECK(temperature >= 0.0 && top_k >= 0 && top_p > 0.0 && top_p <= 1.0,
                  "decode_steps: need temperature >= 0, top_k >= 0, 0 < top_p <= 1: got ", temperature, ", ", top_k, ", ",
                  top_p);
  const BlockList blocks{weights, ropes_of(angles, table_of, shape.dim), windows, routed, static_cast<float>(offset)};
  int64_t limit = limit_of(shape, blocks.ropes);
  if (of_positions) limit = std::min(limit, of_positions->size(0));
  const std::vector<LiveRow> rows = checked_state(state, n_steps, embed.size(0), k.size(1), limit);
  const int64_t n_rows = rows.size();
  check_rows(state.const_data_ptr<int64_t>() + n_rows, prefixes, n_rows, limit, has_windows(windows));
  Tensor result = torch::stable::new_empty(state, {n_steps, 3, n_rows}, ScalarType::Double);
  std::fill_n(result.mutable_data_ptr<double>(), result.numel(), static_cast<double>(kSkipped));
  const StepOptions options{n_steps,     vocab, seed,        min_count,    top_k,
                            temperature, top_p, first_scale, second_scale, logit_scale};
  const auto all = embed.scalar_type() == ScalarType::Float ? run_steps<float> : run_steps<BFloat16>;
  if (n_rows > 0) {
    all(shape, blocks, rows, embed, of_positions, head, stops, prefixes, options, k, v, result.mutable_data_ptr<double>());
  }
  return result;
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_FRAGMENT(realhf, library) {
  library.def(
      "decode_blocks(Tensor x, Tensor[] weights, Tensor(a!) k, Tensor(b!) v, Tensor positions, Tensor? prefixes,"
      " Tensor? slots, Tensor[] angles, int[] table_of, int[] windows, int[] routed, int[] routing, Tensor(c!)? chosen, int sublayers,"
      " int n_heads, int inner, int activation, bool gated, bool parallel, bool layer_norms,"
      " bool has_gates, bool norms_projections, float eps, float offset, float residual_scale, float scale,"
      " float softcap, float query_growth, int growth_period, float expert_scale) -> Tensor");
  library.def(
      "decode_steps(Tensor state, Tensor embed, Tensor? of_positions, Tensor head, Tensor stops, int n_steps, int vocab,"
      " int seed, int min_count, float temperature, int top_k, float top_p, float first_scale, float second_scale,"
      " float logit_scale, Tensor[] weights, Tensor(a!) k, Tensor(b!) v, Tensor? prefixes, Tensor[] angles,"
      " int[] table_of, int[] windows, int[] routed, int[] routing, int n_heads, int inner, int activation, bool gated,"
      " bool parallel, bool layer_norms, bool has_gates, bool norms_projections, float eps, float offset,"
      " float residual_scale, float scale, float softcap, float query_growth, int growth_period, float expert_scale)"
      " -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(realhf, CPU, library) {
  library.impl("decode_blocks", TORCH_BOX(&realhf::decode_blocks_cpu));
  library.impl("decode_steps", TORCH_BOX(&realhf::decode_steps_cpu));
}
