// A head of a packed row under the gated delta rule, and its gradients; compiled for every instruction set by
// multi_isa.h. A token decays the state S to D = a S, then adds k (x) c with c = b (v - D^T k); its output is S^T q.

constexpr int64_t kColumns = 4;  // vectors of a state's columns that are in registers together

// The last token's change of a state, which the next token adds while it decays the state.
struct Change {
  const float *k, *c;
};

// state[:, columns] = decay * (state + change); read = state^T k; asked = state^T q, if there is a query.
template <int kVectors>
REALHF_INLINE void decay_columns(int64_t key_dim, int64_t value_dim, float decay, const Change& change, const float* k,
                                 const float* q, const float* from, float* state, float* read, float* asked) {
  Floats of_keys[kVectors] = {}, of_queries[kVectors] = {}, last[kVectors];
  for (int n = 0; n < kVectors; ++n) last[n] = load(change.c + n * kLanes);
  for (int64_t i = 0; i < key_dim; ++i) {
    for (int n = 0; n < kVectors; ++n) {
      const int64_t at = i * value_dim + n * kLanes;
      const Floats decayed = (load(from + at) + last[n] * change.k[i]) * decay;
      store(state + at, decayed);
      of_keys[n] += decayed * k[i];
      if (q != nullptr) of_queries[n] += decayed * q[i];
    }
  }
  for (int n = 0; n < kVectors; ++n) {
    store(read + n * kLanes, of_keys[n]);
    if (q != nullptr) store(asked + n * kLanes, of_queries[n]);
  }
}

REALHF_NOINLINE void decay_state(int64_t key_dim, int64_t value_dim, float decay, const Change& change, const float* k,
                                 const float* q, const float* from, float* state, float* read, float* asked) {
  int64_t c = 0;
  for (; c + kColumns * kLanes <= value_dim; c += kColumns * kLanes) {
    decay_columns<kColumns>(key_dim, value_dim, decay, {change.k, change.c + c}, k, q, from + c, state + c, read + c,
                            asked + c);
  }
  for (; c < value_dim; c += kLanes) {
    decay_columns<1>(key_dim, value_dim, decay, {change.k, change.c + c}, k, q, from + c, state + c, read + c,
                     asked + c);
  }
}

REALHF_INLINE void add_change(int64_t key_dim, int64_t value_dim, const Change& change, float* state) {
  for (int64_t i = 0; i < key_dim; ++i, state += value_dim) {
    for (int64_t c = 0; c < value_dim; c += kLanes) store(state + c, load(state + c) + load(change.c + c) * change.k[i]);
  }
}

REALHF_INLINE float dot(const float* a, const float* b, int64_t size) {
  Floats sum = {};
  for (int64_t c = 0; c < size; c += kLanes) sum += load(a + c) * load(b + c);
  return horizontal_sum(sum);
}

template <typename scalar_t>
REALHF_INLINE float inverse_norm(const scalar_t* x, int64_t size) {
  Floats sum = {};
  for (int64_t c = 0; c < size; c += kLanes) sum += load(x + c) * load(x + c);
  return 1.0f / __builtin_sqrtf(horizontal_sum(sum) + kNormEps);
}

template <typename scalar_t>
REALHF_INLINE void scaled(const scalar_t* x, int64_t size, float factor, float* to) {
  for (int64_t c = 0; c < size; c += kLanes) store(to + c, load(x + c) * factor);
}

// The outputs of the value heads of a key head for the tokens of a row, and its states behind them, in place. Copies the
// states before every block to `blocks` unless it is null. `scratch` has rule_scratch() floats.
template <typename scalar_t>
REALHF_INLINE void forward_head(const RuleShape& shape, const RuleInputs<scalar_t>& given, const RuleRow& row,
                                int64_t head, float* states, float* blocks, float* outputs, float* scratch) {
  const int64_t key_dim = shape.key_dim, dim = shape.value_dim, size = key_dim * dim, ratio = shape.ratio();
  const float scale = 1.0f / __builtin_sqrtf(key_dim);
  float *const q = scratch, *k = q + key_dim, *last_k = k + key_dim, *const changes = last_k + key_dim;
  float *const read = changes + ratio * dim, *const asked = read + dim;
  for (int64_t i = 0; i < key_dim; ++i) last_k[i] = 0.0f;
  for (int64_t i = 0; i < ratio * dim; ++i) changes[i] = 0.0f;
  for (int64_t t = 0; t < row.count; ++t) {
    const scalar_t* const x = given.mixed + (row.start + t) * shape.channels();
    const scalar_t *const own_q = x + head * key_dim, *const own_k = own_q + shape.keys();
    scaled(own_q, key_dim, scale * inverse_norm(own_q, key_dim), q);
    scaled(own_k, key_dim, inverse_norm(own_k, key_dim), k);
    const float along = dot(q, k, key_dim);
    for (int64_t r = 0; r < ratio; ++r) {
      const int64_t h = head * ratio + r, at = (row.start + t) * shape.n_values + h;
      const scalar_t* const v = x + 2 * shape.keys() + h * dim;
      float *const state = states + r * size, *const c = changes + r * dim, *const out = outputs + at * dim;
      if (blocks != nullptr && t % kBlock == 0) {
        add_change(key_dim, dim, {last_k, c}, state);
        for (int64_t i = 0; i < dim; ++i) c[i] = 0.0f;
        __builtin_memcpy(blocks + ((row.block + t / kBlock) * shape.n_values + h) * size, state, size * sizeof(float));
      }
      decay_state(key_dim, dim, exp_of(Floats{} + given.decay[at])[0], {last_k, c}, k, q, state, state, read, asked);
      for (int64_t i = 0; i < dim; i += kLanes) {
        const Floats change = (load(v + i) - load(read + i)) * given.rate[at];
        store(c + i, change), store(out + i, load(asked + i) + change * along);
      }
    }
    float* const used = last_k;
    last_k = k, k = used;
  }
  for (int64_t r = 0; r < ratio; ++r) add_change(key_dim, dim, {last_k, changes + r * dim}, states + r * size);
}

// grad += q (x) slope; change_grad = grad^T k
template <int kVectors>
REALHF_INLINE void add_slope(int64_t key_dim, int64_t value_dim, const float* q, const float* k, const float* slope,
                             float* grad, float* change_grad) {
  Floats sums[kVectors] = {}, slopes[kVectors];
  for (int n = 0; n < kVectors; ++n) slopes[n] = load(slope + n * kLanes);
  for (int64_t i = 0; i < key_dim; ++i) {
    for (int n = 0; n < kVectors; ++n) {
      float* const at = grad + i * value_dim + n * kLanes;
      const Floats sum = load(at) + slopes[n] * q[i];
      store(at, sum);
      sums[n] += sum * k[i];
    }
  }
  for (int n = 0; n < kVectors; ++n) store(change_grad + n * kLanes, sums[n]);
}

// From the gradient of the state behind a token to that before it, with those of the query and key. `state` is the
// decayed one, `change` was added to it, and `rated` is the change's gradient times the rate. Returns the decay's.
template <int kVectors>
REALHF_INLINE float pass_token(int64_t key_dim, int64_t value_dim, float decay, const float* k, const float* slope,
                               const float* change, const float* rated, const float* state, float* grad, float* q_grad,
                               float* k_grad) {
  Floats slopes[kVectors], changes[kVectors], rates[kVectors], decays = {};
  for (int n = 0; n < kVectors; ++n) {
    slopes[n] = load(slope + n * kLanes), changes[n] = load(change + n * kLanes), rates[n] = load(rated + n * kLanes);
  }
  for (int64_t i = 0; i < key_dim; ++i) {
    Floats of_query = {}, of_key = {};
    for (int n = 0; n < kVectors; ++n) {
      const int64_t at = i * value_dim + n * kLanes;
      const Floats old = load(state + at), sum = load(grad + at), passed = sum - rates[n] * k[i];
      of_query += old * slopes[n];
      of_key += sum * changes[n] - old * rates[n];
      decays += passed * old;
      store(grad + at, passed * decay);
    }
    q_grad[i] += horizontal_sum(of_query), k_grad[i] += horizontal_sum(of_key);
  }
  return horizontal_sum(decays);
}

// The gradient through x * factor, factor = scale / |x|, from that of the result.
template <typename scalar_t>
REALHF_INLINE void unscaled(const scalar_t* x, int64_t size, float scale, const float* grad, scalar_t* to) {
  const float inverse = inverse_norm(x, size);
  Floats sum = {};
  for (int64_t c = 0; c < size; c += kLanes) sum += load(x + c) * load(grad + c);
  const float along = horizontal_sum(sum) * inverse * inverse;
  for (int64_t c = 0; c < size; c += kLanes) {
    store(to + c, (load(grad + c) - load(x + c) * along) * (inverse * scale));
  }
}

// The buffers of backward_head: queries, keys and their gradients of a block, decayed states and errors of a head.
struct BlockBuffers {
  float *q, *k, *q_grad, *k_grad, *states, *errors, *c, *rated, *c_grad, *zeros;
};

// The decayed states and the errors v - D^T k of a block's tokens, from the state before it.
template <typename scalar_t>
REALHF_INLINE void recompute_block(const RuleShape& shape, const RuleInputs<scalar_t>& given, int64_t first,
                                   int64_t count, int64_t h, const float* start, const BlockBuffers& buffers) {
  const int64_t key_dim = shape.key_dim, dim = shape.value_dim, size = key_dim * dim;
  const float *from = start, *last_k = buffers.zeros;
  for (int64_t i = 0; i < dim; ++i) buffers.c[i] = 0.0f;
  for (int64_t t = 0; t < count; ++t) {
    const int64_t at = (first + t) * shape.n_values + h;
    const scalar_t* const v = given.mixed + (first + t) * shape.channels() + 2 * shape.keys() + h * dim;
    float *const state = buffers.states + t * size, *const error = buffers.errors + t * dim;
    const float* const k = buffers.k + t * key_dim;
    decay_state(key_dim, dim, exp_of(Floats{} + given.decay[at])[0], {last_k, buffers.c}, k, nullptr, from, state, error,
                error);
    for (int64_t i = 0; i < dim; i += kLanes) {
      const Floats wrong = load(v + i) - load(error + i);
      store(error + i, wrong), store(buffers.c + i, wrong * given.rate[at]);
    }
    from = state, last_k = k;
  }
}

// The gradients of a block's token `t` in value head `h`; `grad` is that of the state, first behind and then before it.
template <typename scalar_t>
REALHF_INLINE void backward_token(const RuleShape& shape, const RuleInputs<scalar_t>& given, int64_t first, int64_t t,
                                  int64_t h, const BlockBuffers& buffers, float* grad,
                                  const RuleGrads<scalar_t>& grads) {
  const int64_t key_dim = shape.key_dim, dim = shape.value_dim, at = (first + t) * shape.n_values + h;
  const float *const q = buffers.q + t * key_dim, *const k = buffers.k + t * key_dim;
  const float *const slope = given.slopes + at * dim, *const error = buffers.errors + t * dim;
  const float *const state = buffers.states + t * key_dim * dim, rate = given.rate[at];
  const float decay = exp_of(Floats{} + given.decay[at])[0];
  int64_t c = 0;
  for (; c + kColumns * kLanes <= dim; c += kColumns * kLanes) {
    add_slope<kColumns>(key_dim, dim, q, k, slope + c, grad + c, buffers.c_grad + c);
  }
  for (; c < dim; c += kLanes) add_slope<1>(key_dim, dim, q, k, slope + c, grad + c, buffers.c_grad + c);
  scalar_t* const v_grad = grads.mixed + (first + t) * shape.channels() + 2 * shape.keys() + h * dim;
  Floats of_rate = {}, along = {};
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Floats of_change = load(buffers.c_grad + i), change = load(error + i) * rate;
    of_rate += of_change * load(error + i), along += change * load(slope + i);
    store(buffers.c + i, change), store(buffers.rated + i, of_change * rate), store(v_grad + i, of_change * rate);
  }
  float *const q_grad = buffers.q_grad + t * key_dim, *const k_grad = buffers.k_grad + t * key_dim, of_decay = 0.0f;
  for (c = 0; c + kColumns * kLanes <= dim; c += kColumns * kLanes) {
    of_decay += pass_token<kColumns>(key_dim, dim, decay, k, slope + c, buffers.c + c, buffers.rated + c, state + c,
                                     grad + c, q_grad, k_grad);
  }
  for (; c < dim; c += kLanes) {
    of_decay += pass_token<1>(key_dim, dim, decay, k, slope + c, buffers.c + c, buffers.rated + c, state + c, grad + c,
                              q_grad, k_grad);
  }
  const float of_key = horizontal_sum(along);
  for (int64_t i = 0; i < key_dim; i += kLanes) store(q_grad + i, load(q_grad + i) + load(k + i) * of_key);
  grads.decay[at] = of_decay, grads.rate[at] = horizontal_sum(of_rate);
}

// The gradients of a key head and its value heads for the tokens of a row; `states` are those of the states behind the
// row, and then of those before it.
template <typename scalar_t>
REALHF_INLINE void backward_head(const RuleShape& shape, const RuleInputs<scalar_t>& given, const RuleRow& row,
                                 int64_t head, const float* blocks, float* states, const RuleGrads<scalar_t>& grads,
                                 float* scratch) {
  const int64_t key_dim = shape.key_dim, dim = shape.value_dim, size = key_dim * dim, ratio = shape.ratio();
  const float scale = 1.0f / __builtin_sqrtf(key_dim);
  BlockBuffers buffers;
  for (float** each : {&buffers.q, &buffers.k, &buffers.q_grad, &buffers.k_grad}) {
    *each = scratch, scratch += kBlock * key_dim;
  }
  buffers.states = scratch, buffers.errors = buffers.states + kBlock * size;
  buffers.c = buffers.errors + kBlock * dim, buffers.rated = buffers.c + dim, buffers.c_grad = buffers.rated + dim;
  buffers.zeros = buffers.c_grad + dim;
  for (int64_t i = 0; i < key_dim; ++i) buffers.zeros[i] = 0.0f;
  for (int64_t block = (row.count - 1) / kBlock; block >= 0; --block) {
    const int64_t first = row.start + block * kBlock, count = min_of(row.count - block * kBlock, kBlock);
    for (int64_t i = 0; i < count * key_dim; ++i) buffers.q_grad[i] = buffers.k_grad[i] = 0.0f;
    for (int64_t t = 0; t < count; ++t) {
      const scalar_t *const q = given.mixed + (first + t) * shape.channels() + head * key_dim, *const k = q + shape.keys();
      scaled(q, key_dim, scale * inverse_norm(q, key_dim), buffers.q + t * key_dim);
      scaled(k, key_dim, inverse_norm(k, key_dim), buffers.k + t * key_dim);
    }
    for (int64_t h = head * ratio; h < (head + 1) * ratio; ++h) {
      const float* const start = blocks + ((row.block + block) * shape.n_values + h) * size;
      recompute_block(shape, given, first, count, h, start, buffers);
      float* const grad = states + (h - head * ratio) * size;
      for (int64_t t = count - 1; t >= 0; --t) backward_token(shape, given, first, t, h, buffers, grad, grads);
    }
    for (int64_t t = 0; t < count; ++t) {
      const int64_t at = (first + t) * shape.channels() + head * key_dim;
      unscaled(given.mixed + at, key_dim, scale, buffers.q_grad + t * key_dim, grads.mixed + at);
      unscaled(given.mixed + at + shape.keys(), key_dim, 1.0f, buffers.k_grad + t * key_dim,
               grads.mixed + at + shape.keys());
    }
  }
}

#define REALHF_HEADS_OF(scalar_t)                                                                                     \
  void rule_forward(const RuleShape& shape, const RuleInputs<scalar_t>& given, const RuleRow& row, int64_t head,      \
                    float* states, float* blocks, float* outputs, float* scratch) {                                   \
    forward_head(shape, given, row, head, states, blocks, outputs, scratch);                                          \
  }                                                                                                                   \
  void rule_backward(const RuleShape& shape, const RuleInputs<scalar_t>& given, const RuleRow& row, int64_t head,     \
                     const float* blocks, float* states, const RuleGrads<scalar_t>& grads, float* scratch) {          \
    backward_head(shape, given, row, head, blocks, states, grads, scratch);                                           \
  }
REALHF_HEADS_OF(float)
REALHF_HEADS_OF(BFloat16)
#undef REALHF_HEADS_OF
