// One decoding step of a range of rows; compiled for every instruction set by multi_isa.h.
#include "tile_rows.h"

constexpr int64_t kDotRows = REALHF_WIDTH == 16 ? 4 : 3;  // queries per register tile of scores
constexpr int64_t kDotKeys = 4;                           // keys per register tile of scores

typedef float Quad __attribute__((vector_size(16)));
typedef int32_t QuadInts __attribute__((vector_size(16)));

REALHF_INLINE Quad folded(const Vec& lanes) {
  Quad parts[REALHF_WIDTH / 4];
  __builtin_memcpy(parts, &lanes, sizeof lanes);
  for (int size = REALHF_WIDTH / 8; size > 0; size /= 2) {
    for (int i = 0; i < size; ++i) parts[i] += parts[i + size];
  }
  return parts[0];
}

// The horizontal sums of four vectors.
REALHF_INLINE Quad totals(const Vec* four) {
  const QuadInts low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, left = {0, 1, 4, 5}, right = {2, 3, 6, 7};
  const Quad a = folded(four[0]), b = folded(four[1]), c = folded(four[2]), d = folded(four[3]);
  const Quad first = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
  const Quad second = __builtin_shuffle(c, d, low) + __builtin_shuffle(c, d, high);
  return __builtin_shuffle(first, second, left) + __builtin_shuffle(first, second, right);
}

// The scores of kRows queries with kKeys keys, accumulated in registers.
template <int kRows, int kKeys, typename scalar_t>
REALHF_INLINE void dot_tile(int64_t depth, const float* x, const scalar_t* keys, float* out, int64_t out_row) {
  Vec sums[kRows][kDotKeys] = {};  // sums of missing keys stay zero
  for (int64_t k = 0; k < depth; k += REALHF_WIDTH) {
    Vec left[kRows];
    for (int m = 0; m < kRows; ++m) left[m] = load_vec(x + m * depth + k);
    for (int n = 0; n < kKeys; ++n) {
      const Vec right = load_vec(keys + n * depth + k);
      for (int m = 0; m < kRows; ++m) sums[m][n] += left[m] * right;
    }
  }
  for (int m = 0; m < kRows; ++m) {
    const Quad sum = totals(sums[m]);
    __builtin_memcpy(out + m * out_row, &sum, kKeys * sizeof(float));
  }
}

template <int kKeys, typename scalar_t>
REALHF_INLINE void dot_rows(int64_t rows, int64_t depth, const float* x, const scalar_t* keys, float* out,
                            int64_t out_row) {
  for (int64_t r = 0; r < rows; r += kDotRows, x += kDotRows * depth, out += kDotRows * out_row) {
    switch (min_of(kDotRows, rows - r)) {
      case 1:
        dot_tile<1, kKeys>(depth, x, keys, out, out_row);
        break;
      case 2:
        dot_tile<2, kKeys>(depth, x, keys, out, out_row);
        break;
      case 3:
        dot_tile<3, kKeys>(depth, x, keys, out, out_row);
        break;
#if REALHF_WIDTH == 16
      case 4:
        dot_tile<4, kKeys>(depth, x, keys, out, out_row);
        break;
#endif
    }
  }
}

// out[rows, count] = x[rows, depth] . keys[count, depth]^T
template <typename scalar_t>
REALHF_NOINLINE void scores_of(int64_t rows, int64_t count, int64_t depth, const float* x, const scalar_t* keys,
                               float* out, int64_t out_row) {
  int64_t j = 0;
  for (; j + kDotKeys <= count; j += kDotKeys) dot_rows<kDotKeys>(rows, depth, x, keys + j * depth, out + j, out_row);
  for (; j < count; ++j) dot_rows<1>(rows, depth, x, keys + j * depth, out + j, out_row);
}

// `size` is a multiple of kLanes; `to` may be `x`.
template <typename scalar_t>
REALHF_NOINLINE void normalise(const Norm<scalar_t>& norm, float eps, int64_t rows, int64_t size, const float* x,
                               float* to) {
  for (int64_t r = 0; r < rows; ++r, x += size, to += size) {
    Floats sum = {}, squares = {};
    if (norm.is_layer_norm) {
      for (int64_t c = 0; c < size; c += kLanes) sum += load(x + c);
    }
    const float mean = norm.is_layer_norm ? horizontal_sum(sum) / size : 0.0f;
    for (int64_t c = 0; c < size; c += kLanes) {
      const Floats centred = load(x + c) - mean;
      squares += centred * centred;
    }
    const float scale = 1.0f / __builtin_sqrtf(horizontal_sum(squares) / size + eps);
    for (int64_t c = 0; c < size; c += kLanes) {
      Floats scaled = (load(x + c) - mean) * scale * (load(norm.weight + c) + norm.offset);
      if (norm.bias) scaled += load(norm.bias + c);
      store(to + c, scaled);
    }
  }
}

template <typename scalar_t>
REALHF_INLINE void convert(scalar_t* to, const float* from, int64_t count) {
  for (int64_t c = 0; c < count; c += kLanes) store(to + c, load(from + c));
}

// A product whose outputs the threads of a team divide.
template <typename scalar_t>
struct ProductCall {
  const Matrix<scalar_t>& matrix;
  int64_t rows;
  const float* x;
  bool add;
  float* y;
  int64_t y_row, n_parts;
};

template <typename scalar_t>
REALHF_NOINLINE void product_part(void* given, int64_t part) {
  const auto& call = *static_cast<const ProductCall<scalar_t>*>(given);
  const Matrix<scalar_t>& all = call.matrix;
  const int64_t n_tiles = all.outs / kPadding, from = part * n_tiles / call.n_parts * kPadding;
  const int64_t outs = (part + 1) * n_tiles / call.n_parts * kPadding - from;
  if (outs == 0) return;
  linear(all.part(from, outs), call.rows, call.x, call.add, call.y + from, call.y_row);
}

template <typename scalar_t>
REALHF_INLINE void linear(const Team& team, const Matrix<scalar_t>& matrix, int64_t rows, const float* x, bool add,
                          float* y, int64_t y_row) {
  if (team.n_threads == 1) return linear(matrix, rows, x, add, y, y_row);
  ProductCall<scalar_t> call{matrix, rows, x, add, y, y_row, team.n_threads};
  team.run(team.n_threads, product_part<scalar_t>, &call);
}

#include "expert_rows.h"

// Replaces a row of scores, padded to whole vectors, by exponentials and returns their sum, with that of a sink, the
// score of one more key without a value (minus infinity: none).
REALHF_NOINLINE float softmax_row(const Shape& shape, int64_t count, float sink, float* scores) {
  Floats most = Floats{} - kInfinity, sums = {};
  for (int64_t j = 0; j < count; j += kLanes) {
    Floats some = load(scores + j) * shape.scale;
    if (shape.softcap > 0) some = tanh_of(some * (1.0f / shape.softcap)) * shape.softcap;
    some = mask_outside(some, j, 0, count, -kInfinity);
    store(scores + j, some);
    most = larger(some, most);
  }
  const float of_keys = horizontal_max(most), largest = sink > of_keys ? sink : of_keys;
  for (int64_t j = 0; j < count; j += kLanes) {
    const Floats share = exp_of(load(scores + j) - largest);
    store(scores + j, share);
    sums += share;
  }
  const float sum = horizontal_sum(sums);
  return sink == -kInfinity ? sum : sum + exp_of(Floats{} + (sink - largest))[0];
}

// Normalises and rotates a row's queries and keys and writes its keys and values to a slot of the cache.
template <typename cache_t, typename scalar_t>
REALHF_INLINE void append_row(const Shape& shape, const Layer<scalar_t>& layer, int64_t slot, int64_t position,
                              float* qkv) {
  const int64_t dim = shape.dim;
  float *k = qkv + shape.n_q * dim, *v = k + shape.n_kv * dim;
  if (layer.q_norm.weight) {
    const bool whole = shape.norms_projections;
    normalise(layer.q_norm, shape.eps, whole ? 1 : shape.n_q, whole ? shape.n_q * dim : dim, qkv, qkv);
    normalise(layer.k_norm, shape.eps, whole ? 1 : shape.n_kv, whole ? shape.n_kv * dim : dim, k, k);
  }
  for (int64_t h = 0; h < (layer.rope.rotary_dim > 0 ? shape.n_q + shape.n_kv : 0); ++h) {
    rotate(layer.rope, position, 1.0f, qkv + h * dim);
  }
  if (shape.query_growth != 0 && position >= shape.growth_period) {
    const float scale = 1.0f + shape.query_growth * __builtin_logf(1 + position / shape.growth_period);
    for (int64_t c = 0; c < shape.n_q * dim; c += kLanes) store(qkv + c, load(qkv + c) * scale);
  }
  for (int64_t h = 0; h < shape.n_kv; ++h) {
    convert(cached<cache_t>(layer.keys, shape.place(slot, h, position)), k + h * dim, dim);
    convert(cached<cache_t>(layer.values, shape.place(slot, h, position)), v + h * dim, dim);
  }
}

// out[n, dim] (+)= probs[n, count] . values[count, dim]
template <typename scalar_t>
REALHF_INLINE void weighted_sum(int64_t n, int64_t count, int64_t dim, const float* shares, int64_t across,
                                const scalar_t* values, bool add, float* out) {
  for (int64_t i = 0; i < n; i += kMaxRows) {
    gemm(min_of(kMaxRows, n - i), dim, count, shares + i * across, across, 1, values, dim, out + i * dim, dim, add);
  }
}

// Attention of one key/value head of a prefix group; the shared keys are read from the holder's cache.
template <typename cache_t, typename scalar_t>
REALHF_INLINE void attend(const Shape& shape, const Layer<scalar_t>& layer, const PrefixGroup& prefix_group,
                          int64_t head, const int64_t* positions, const int64_t* slots, const HeadBuffers& buffers) {
  const int64_t dim = shape.dim, group_size = shape.n_q / shape.n_kv, across = padded(prefix_group.longest);
  const bool is_alone = prefix_group.n_rows == 1 && prefix_group.holder == slot_of(slots, prefix_group.rows[0]);
  const int64_t shared = layer.window > 0 || is_alone ? 0 : prefix_group.shared;
  const int64_t first = shape.place(prefix_group.holder, head, 0), n_queries = prefix_group.n_rows * group_size;
  const auto begin = [&](int64_t position) {  // first key of a row that is not shared
    return layer.window > 0 ? max_of(0, position - layer.window + 1) : shared;
  };
  float *const scores = buffers.scores, *const out = buffers.heads;
  if (shared > 0) {
    scores_of(n_queries, shared, dim, buffers.queries, cached<cache_t>(layer.keys, first), scores, across);
  }
  for (int64_t i = 0; i < prefix_group.n_rows; ++i) {
    const int64_t row = prefix_group.rows[i], from = begin(positions[row]);
    const int64_t count = positions[row] - from + 1;
    const cache_t* keys = cached<cache_t>(layer.keys, shape.place(slot_of(slots, row), head, from));
    float* const of_row = scores + i * group_size * across;
    scores_of(group_size, count, dim, buffers.queries + i * group_size * dim, keys, of_row + shared, across);
    for (int64_t g = 0; g < group_size; ++g) {
      const float sink = layer.sinks ? as_float(layer.sinks[head * group_size + g]) : -kInfinity;
      buffers.sums[i * group_size + g] = softmax_row(shape, shared + count, sink, of_row + g * across);
    }
  }
  if (shared > 0) weighted_sum(n_queries, shared, dim, scores, across, cached<cache_t>(layer.values, first), false, out);
  for (int64_t i = 0; i < prefix_group.n_rows; ++i) {
    const int64_t row = prefix_group.rows[i], from = begin(positions[row]);
    weighted_sum(group_size, positions[row] - from + 1, dim, scores + i * group_size * across + shared, across,
                 cached<cache_t>(layer.values, shape.place(slot_of(slots, row), head, from)), shared > 0,
                 out + i * group_size * dim);
  }
  for (int64_t q = 0; q < n_queries; ++q) {
    const float scale = 1.0f / buffers.sums[q];
    for (int64_t c = q * dim; c < (q + 1) * dim; c += kLanes) store(out + c, load(out + c) * scale);
  }
}

// One key/value head of a prefix group. The buffers start at row `from`.
template <typename cache_t, typename scalar_t>
REALHF_INLINE void attend_head(const Shape& shape, const Layer<scalar_t>& layer, const PrefixGroup& prefix_group,
                               int64_t head, int64_t from, const int64_t* positions, const int64_t* slots,
                               const Buffers& buffers, const HeadBuffers& own) {
  const int64_t of_group = shape.n_q / shape.n_kv * shape.dim, of_qkv = shape.of_qkv();
  for (int64_t i = 0; i < prefix_group.n_rows; ++i) {
    convert(own.queries + i * of_group, buffers.projected + (prefix_group.rows[i] - from) * of_qkv + head * of_group,
            of_group);
  }
  attend<cache_t>(shape, layer, prefix_group, head, positions, slots, own);
  for (int64_t i = 0; i < prefix_group.n_rows; ++i) {
    float* const to = buffers.mixed + (prefix_group.rows[i] - from) * shape.n_q * shape.dim + head * of_group;
    convert(to, own.heads + i * of_group, of_group);
  }
}

// All heads of all prefix groups; a thread of the team takes every n-th one.
template <typename scalar_t>
struct AttentionCall {
  const Shape& shape;
  const Layer<scalar_t>& layer;
  int64_t from;
  const int64_t *positions, *slots;
  const Buffers& buffers;
};

template <typename cache_t, typename scalar_t>
REALHF_NOINLINE void attend_part(void* given, int64_t part) {
  const auto& call = *static_cast<const AttentionCall<scalar_t>*>(given);
  const int64_t n_kv = call.shape.n_kv;
  for (int64_t i = part; i < call.buffers.n_groups * n_kv; i += call.buffers.team.n_threads) {
    attend_head<cache_t>(call.shape, call.layer, call.buffers.groups[i / n_kv], i % n_kv, call.from, call.positions, call.slots,
                call.buffers, call.buffers.own[part]);
  }
}

// x += scale * product, with a post-norm if the model has one.
template <typename scalar_t>
REALHF_INLINE void add_product(const Shape& shape, const Norm<scalar_t>& post, int64_t rows, Buffers& buffers) {
  float *const x = buffers.x, *const product = buffers.product;
  if (post.weight) normalise(post, shape.eps, rows, shape.hidden, product, product);
  for (int64_t c = 0; c < rows * shape.hidden; c += kLanes) {
    store(x + c, load(x + c) + load(product + c) * shape.residual_scale);
  }
}

// x += scale * (inner . matrix^T + bias); of a sublayer whose result is its product, this product only.
template <typename scalar_t>
REALHF_INLINE void add_linear(const Shape& shape, const Matrix<scalar_t>& matrix, const Norm<scalar_t>& post,
                              int64_t rows, const float* inner, Buffers& buffers) {
  const bool is_plain = shape.sublayers == Sublayers::both && !post.weight && shape.residual_scale == 1;
  linear(buffers.team, matrix, rows, inner, is_plain, is_plain ? buffers.x : buffers.product, shape.hidden);
  if (shape.sublayers == Sublayers::both && !is_plain) add_product(shape, post, rows, buffers);
}

// mixed[rows, heads] *= sigmoid of the gates, which are behind the values.
REALHF_INLINE void apply_gates(const Shape& shape, int64_t rows, Buffers& buffers) {
  const int64_t size = shape.n_q * shape.dim, of_qkv = shape.of_qkv();
  for (int64_t r = 0; r < rows; ++r) {
    float* const mixed = buffers.mixed + r * size;
    const float* const gates = buffers.projected + (r + 1) * of_qkv - size;
    for (int64_t c = 0; c < size; c += kLanes) store(mixed + c, load(mixed + c) * sigmoid(load(gates + c)));
  }
}

// inner = the norm of x; x itself for a model without norms of inputs.
template <typename scalar_t>
REALHF_INLINE void normalise_input(const Shape& shape, const Norm<scalar_t>& norm, int64_t rows, Buffers& buffers) {
  if (norm.weight) return normalise(norm, shape.eps, rows, shape.hidden, buffers.x, buffers.inner);
  convert(buffers.inner, buffers.x, rows * shape.hidden);
}

// Stores the keys and values of all rows before their attention.
template <typename cache_t, typename scalar_t>
REALHF_INLINE void attend_rows(const Shape& shape, const Layer<scalar_t>& layer, int64_t first, int64_t rows,
                               const int64_t* positions, const int64_t* slots, Buffers& buffers) {
  for (int64_t r = 0; r < rows; ++r) {
    append_row<cache_t>(shape, layer, slot_of(slots, first + r), positions[first + r],
                        buffers.projected + r * shape.of_qkv());
  }
  AttentionCall<scalar_t> call{shape, layer, first, positions, slots, buffers};
  buffers.team.run(buffers.team.n_threads, attend_part<cache_t, scalar_t>, &call);
}

template <typename scalar_t>
REALHF_INLINE void run_attention(const Shape& shape, const Layer<scalar_t>& layer, int64_t first, int64_t rows,
                                 const int64_t* positions, const int64_t* slots, Buffers& buffers) {
  normalise_input(shape, layer.norm, rows, buffers);
  linear(buffers.team, layer.qkv, rows, buffers.inner, false, buffers.projected, shape.of_qkv());
  if (shape.has_bf16_cache) {
    attend_rows<BFloat16>(shape, layer, first, rows, positions, slots, buffers);
  } else {
    attend_rows<float>(shape, layer, first, rows, positions, slots, buffers);
  }
  if (shape.has_gates) apply_gates(shape, rows, buffers);
}

// `inner` is the normalised input.
template <typename scalar_t>
REALHF_INLINE void run_mlp(const Shape& shape, const Layer<scalar_t>& layer, int64_t first, int64_t rows,
                           Buffers& buffers) {
  if (layer.is_routed) {
    run_experts(shape, layer, first, rows, buffers);
    if (shape.sublayers == Sublayers::both) add_product(shape, layer.mlp_post_norm, rows, buffers);
    return;
  }
  linear(buffers.team, layer.up, rows, buffers.inner, false, buffers.projected, layer.up.outs);
  activate(shape, shape.inner, rows, buffers.projected);
  add_linear(shape, layer.down, layer.mlp_post_norm, rows, buffers.projected, buffers);
}

template <typename scalar_t>
REALHF_INLINE void run_block(const Shape& shape, const Layer<scalar_t>& layer, int64_t first, int64_t rows,
                             const int64_t* positions, const int64_t* slots, Buffers& buffers) {
  const bool is_parallel = shape.parallel && shape.sublayers == Sublayers::both;
  if (shape.sublayers != Sublayers::mlp) {
    run_attention(shape, layer, first, rows, positions, slots, buffers);
    if (is_parallel) normalise_input(shape, layer.mlp_norm, rows, buffers);
    add_linear(shape, layer.out, layer.post_norm, rows, buffers.mixed, buffers);
  }
  if (shape.sublayers == Sublayers::attention) return;
  if (!is_parallel) normalise_input(shape, layer.mlp_norm, rows, buffers);
  run_mlp(shape, layer, first, rows, buffers);
}

template <typename scalar_t>
REALHF_INLINE void run_some(const Shape& shape, const Stage<scalar_t>& stage, int64_t first, int64_t rows,
                            Buffers& buffers) {
  const int64_t size = rows * shape.hidden;
  for (int64_t c = 0; c < size; c += kLanes) store(buffers.x + c, load(stage.x + first * shape.hidden + c));
  for (const Layer<scalar_t>* layer = stage.layers; layer != stage.layers + stage.n_layers; ++layer) {
    run_block(shape, *layer, first, rows, stage.positions, stage.slots, buffers);
  }
  if (stage.final_norm.weight) {
    normalise(stage.final_norm, shape.eps, rows, shape.hidden, buffers.x, buffers.x);
  }
  convert(stage.result + first * shape.hidden, shape.sublayers == Sublayers::both ? buffers.x : buffers.product, size);
}

void run_stage(const Shape& shape, const Stage<float>& stage, int64_t first, int64_t rows, Buffers& buffers) {
  run_some(shape, stage, first, rows, buffers);
}

void run_stage(const Shape& shape, const Stage<BFloat16>& stage, int64_t first, int64_t rows, Buffers& buffers) {
  run_some(shape, stage, first, rows, buffers);
}
