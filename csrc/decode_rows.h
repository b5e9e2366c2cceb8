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

template <Activation activation>
REALHF_INLINE void activate_all(const Shape& shape, int64_t rows, float* projected) {
  const int64_t inner = shape.inner, across = shape.gated ? 2 * inner : inner;
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = projected + r * across;
    for (int64_t c = 0; c < inner; c += kLanes) {
      Floats value = activated<activation>(load(from + c));
      if (shape.gated) value *= load(from + inner + c);
      store(projected + r * inner + c, value);
    }
  }
}

// projected[rows, inner or 2 * inner] -> [rows, inner], in place.
REALHF_NOINLINE void activate(const Shape& shape, int64_t rows, float* projected) {
  switch (shape.activation) {
    case Activation::silu:
      return activate_all<Activation::silu>(shape, rows, projected);
    case Activation::gelu:
      return activate_all<Activation::gelu>(shape, rows, projected);
    case Activation::gelu_tanh:
      return activate_all<Activation::gelu_tanh>(shape, rows, projected);
  }
}

template <typename scalar_t>
REALHF_INLINE void convert(scalar_t* to, const float* from, int64_t count) {
  for (int64_t c = 0; c < count; c += kLanes) store(to + c, load(from + c));
}

// Replaces a row of scores, padded to whole vectors, by exponentials and returns their sum.
REALHF_NOINLINE float softmax_row(const Shape& shape, int64_t count, float* scores) {
  Floats most = Floats{} - kInfinity, sums = {};
  for (int64_t j = 0; j < count; j += kLanes) {
    Floats some = load(scores + j) * shape.scale;
    if (shape.softcap > 0) some = tanh_of(some * (1.0f / shape.softcap)) * shape.softcap;
    some = mask_outside(some, j, 0, count, -kInfinity);
    store(scores + j, some);
    most = larger(some, most);
  }
  const float largest = horizontal_max(most);
  for (int64_t j = 0; j < count; j += kLanes) {
    const Floats share = exp_of(load(scores + j) - largest);
    store(scores + j, share);
    sums += share;
  }
  return horizontal_sum(sums);
}

// Normalises and rotates a row's queries and keys and writes its keys and values to the cache.
template <typename scalar_t>
REALHF_INLINE void append_row(const Shape& shape, const Layer<scalar_t>& layer, int64_t row, int64_t position,
                              float* qkv) {
  const int64_t dim = shape.dim;
  float *k = qkv + shape.n_q * dim, *v = k + shape.n_kv * dim;
  if (layer.q_norm.weight) {
    normalise(layer.q_norm, shape.eps, shape.n_q, dim, qkv, qkv);
    normalise(layer.k_norm, shape.eps, shape.n_kv, dim, k, k);
  }
  for (int64_t h = 0; h < (layer.rope.rotary_dim > 0 ? shape.n_q + shape.n_kv : 0); ++h) {
    rotate(layer.rope, position, 1.0f, qkv + h * dim);
  }
  if (shape.query_growth != 0 && position >= shape.growth_period) {
    const float scale = 1.0f + shape.query_growth * __builtin_logf(1 + position / shape.growth_period);
    for (int64_t c = 0; c < shape.n_q * dim; c += kLanes) store(qkv + c, load(qkv + c) * scale);
  }
  for (int64_t h = 0; h < shape.n_kv; ++h) {
    convert(layer.keys + shape.place(row, h, position), k + h * dim, dim);
    convert(layer.values + shape.place(row, h, position), v + h * dim, dim);
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
template <typename scalar_t>
REALHF_INLINE void attend(const Shape& shape, const Layer<scalar_t>& layer, const PrefixGroup& prefix_group,
                          int64_t head, const int64_t* positions, Buffers& buffers) {
  const int64_t dim = shape.dim, group_size = shape.n_q / shape.n_kv, across = padded(prefix_group.longest);
  const bool is_alone = prefix_group.n_rows == 1 && prefix_group.holder == prefix_group.rows[0];
  const int64_t shared = layer.window > 0 || is_alone ? 0 : prefix_group.shared;
  const int64_t first = shape.place(prefix_group.holder, head, 0), n_queries = prefix_group.n_rows * group_size;
  const auto begin = [&](int64_t position) {  // first key of a row that is not shared
    return layer.window > 0 ? max_of(0, position - layer.window + 1) : shared;
  };
  float *const scores = buffers.scores, *const out = buffers.heads;
  if (shared > 0) {
    scores_of(n_queries, shared, dim, buffers.queries, layer.keys + first, scores, across);
  }
  for (int64_t i = 0; i < prefix_group.n_rows; ++i) {
    const int64_t row = prefix_group.rows[i], from = begin(positions[row]);
    const int64_t count = positions[row] - from + 1;
    const scalar_t* keys = layer.keys + shape.place(row, head, from);
    float* const of_row = scores + i * group_size * across;
    scores_of(group_size, count, dim, buffers.queries + i * group_size * dim, keys, of_row + shared, across);
    for (int64_t g = 0; g < group_size; ++g) {
      buffers.sums[i * group_size + g] = softmax_row(shape, shared + count, of_row + g * across);
    }
  }
  if (shared > 0) weighted_sum(n_queries, shared, dim, scores, across, layer.values + first, false, out);
  for (int64_t i = 0; i < prefix_group.n_rows; ++i) {
    const int64_t row = prefix_group.rows[i], from = begin(positions[row]);
    weighted_sum(group_size, positions[row] - from + 1, dim, scores + i * group_size * across + shared, across,
                 layer.values + shape.place(row, head, from), shared > 0, out + i * group_size * dim);
  }
  for (int64_t q = 0; q < n_queries; ++q) {
    const float scale = 1.0f / buffers.sums[q];
    for (int64_t c = q * dim; c < (q + 1) * dim; c += kLanes) store(out + c, load(out + c) * scale);
  }
}

// All heads of a prefix group. Rows have cache numbers; the buffers start at row `from`.
template <typename scalar_t>
REALHF_INLINE void attend_group(const Shape& shape, const Layer<scalar_t>& layer, const PrefixGroup& prefix_group,
                                int64_t from, const int64_t* positions, Buffers& buffers) {
  const int64_t of_group = shape.n_q / shape.n_kv * shape.dim, of_qkv = (shape.n_q + 2 * shape.n_kv) * shape.dim;
  for (int64_t head = 0; head < shape.n_kv; ++head) {
    for (int64_t i = 0; i < prefix_group.n_rows; ++i) {
      convert(buffers.queries + i * of_group,
              buffers.projected + (prefix_group.rows[i] - from) * of_qkv + head * of_group, of_group);
    }
    attend(shape, layer, prefix_group, head, positions, buffers);
    for (int64_t i = 0; i < prefix_group.n_rows; ++i) {
      float* const to = buffers.mixed + (prefix_group.rows[i] - from) * shape.n_q * shape.dim + head * of_group;
      convert(to, buffers.heads + i * of_group, of_group);
    }
  }
}

// x += scale * (inner . matrix^T + bias), with a post-norm if the model has one.
template <typename scalar_t>
REALHF_INLINE void add_product(const Shape& shape, const Matrix<scalar_t>& matrix, const Norm<scalar_t>& post,
                               int64_t rows, const float* inner, const Buffers& buffers, float* x) {
  if (!post.weight && shape.residual_scale == 1) return linear(matrix, rows, inner, true, x, shape.hidden);
  linear(matrix, rows, inner, false, buffers.gemm, shape.hidden);
  if (post.weight) normalise(post, shape.eps, rows, shape.hidden, buffers.gemm, buffers.gemm);
  for (int64_t c = 0; c < rows * shape.hidden; c += kLanes) {
    store(x + c, load(x + c) + load(buffers.gemm + c) * shape.residual_scale);
  }
}

template <typename scalar_t>
REALHF_INLINE void run_block(const Shape& shape, const Layer<scalar_t>& layer, int64_t first, int64_t rows,
                             const int64_t* positions, Buffers& buffers) {
  const int64_t of_qkv = (shape.n_q + 2 * shape.n_kv) * shape.dim;
  normalise(layer.norm, shape.eps, rows, shape.hidden, buffers.x, buffers.inner);
  linear(layer.qkv, rows, buffers.inner, false, buffers.projected, of_qkv);
  for (int64_t r = 0; r < rows; ++r) {
    append_row(shape, layer, first + r, positions[first + r], buffers.projected + r * of_qkv);
  }
  for (const PrefixGroup& prefix_group : buffers.prefix_groups)
    attend_group(shape, layer, prefix_group, first, positions, buffers);
  if (shape.parallel) normalise(layer.mlp_norm, shape.eps, rows, shape.hidden, buffers.x, buffers.inner);
  add_product(shape, layer.out, layer.post_norm, rows, buffers.mixed, buffers, buffers.x);
  if (!shape.parallel) normalise(layer.mlp_norm, shape.eps, rows, shape.hidden, buffers.x, buffers.inner);
  linear(layer.up, rows, buffers.inner, false, buffers.projected, layer.up.outs);
  activate(shape, rows, buffers.projected);
  add_product(shape, layer.down, layer.mlp_post_norm, rows, buffers.projected, buffers, buffers.x);
}

template <typename scalar_t>
REALHF_INLINE void run_some(const Shape& shape, const Stage<scalar_t>& stage, int64_t first, int64_t rows,
                            Buffers& buffers) {
  const int64_t size = rows * shape.hidden;
  for (int64_t c = 0; c < size; c += kLanes) store(buffers.x + c, load(stage.x + first * shape.hidden + c));
  for (const Layer<scalar_t>* layer = stage.layers; layer != stage.layers + stage.n_layers; ++layer) {
    run_block(shape, *layer, first, rows, stage.positions, buffers);
  }
  if (stage.final_norm.weight) {
    normalise(stage.final_norm, shape.eps, rows, shape.hidden, buffers.x, buffers.x);
  }
  convert(stage.result + first * shape.hidden, buffers.x, size);
}

void run_stage(const Shape& shape, const Stage<float>& stage, int64_t first, int64_t rows, Buffers& buffers) {
  run_some(shape, stage, first, rows, buffers);
}

void run_stage(const Shape& shape, const Stage<BFloat16>& stage, int64_t first, int64_t rows, Buffers& buffers) {
  run_some(shape, stage, first, rows, buffers);
}
