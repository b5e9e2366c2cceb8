// MLPs of a decoding step, dense ones and routed experts, for a range of rows; compiled for every instruction set by
// multi_isa.h.

// projected[rows, inner or 2 * inner] -> [rows, inner], in place.
template <Activation activation>
REALHF_INLINE void activate_all(bool gated, int64_t inner, int64_t rows, float* projected) {
  const int64_t across = gated ? 2 * inner : inner;
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = projected + r * across;
    for (int64_t c = 0; c < inner; c += kLanes) {
      Floats value = activated<activation>(load(from + c));
      if (gated) value *= load(from + inner + c);
      store(projected + r * inner + c, value);
    }
  }
}

// gate * sigmoid(1.702 * gate) * (up + 1), both limited; a NaN stays.
REALHF_INLINE void activate_clamped(int64_t inner, int64_t rows, float* projected) {
  const Floats most = Floats{} + kClamp, least = -most;
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = projected + r * 2 * inner;
    for (int64_t c = 0; c < inner; c += kLanes) {
      Floats gate = load(from + c), up = load(from + inner + c);
      gate = gate > most ? most : gate;
      up = up > most ? most : up;
      up = up < least ? least : up;
      store(projected + r * inner + c, gate * sigmoid(gate * kQuickGelu) * (up + 1.0f));
    }
  }
}

REALHF_NOINLINE void activate(const Shape& shape, int64_t inner, int64_t rows, float* projected) {
  switch (shape.activation) {
    case Activation::silu:
      return activate_all<Activation::silu>(shape.gated, inner, rows, projected);
    case Activation::gelu:
      return activate_all<Activation::gelu>(shape.gated, inner, rows, projected);
    case Activation::gelu_tanh:
      return activate_all<Activation::gelu_tanh>(shape.gated, inner, rows, projected);
    case Activation::clamped_swiglu:
      return activate_clamped(inner, rows, projected);
  }
}

// Replaces the logits of a row by scores, their softmax or sigmoid.
REALHF_INLINE void score_experts(const Routing& routing, float* row) {
  const int64_t count = routing.count;
  if (routing.is_sigmoid) {
    for (int64_t e = 0; e < count; e += kLanes) store(row + e, sigmoid(load(row + e)));
    return;
  }
  Floats most = Floats{} - kInfinity, sums = {};
  for (int64_t e = 0; e < count; e += kLanes) {
    const Floats some = mask_outside(load(row + e), e, 0, count, -kInfinity);
    store(row + e, some);
    most = larger(some, most);
  }
  const float largest = horizontal_max(most);
  for (int64_t e = 0; e < count; e += kLanes) {
    const Floats share = exp_of(load(row + e) - largest);
    store(row + e, share);
    sums += share;
  }
  const float total = horizontal_sum(sums);
  for (int64_t e = 0; e < count; e += kLanes) store(row + e, load(row + e) / total);
}

// The index of the largest of `count` values.
REALHF_INLINE int64_t largest_of(const float* values, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 1; i < count; ++i) best = values[i] > values[best] ? i : best;
  return best;
}

// Values are at least kLowest, which NaN becomes too, so that one of minus infinity is never the largest.
REALHF_INLINE float comparable(float value) { return value >= kLowest ? value : kLowest; }

// Excludes experts of all groups but those with the largest sums of two scores; `sums` has a place per group.
REALHF_INLINE void limit_groups(const Routing& routing, float* scores, float* sums) {
  const int64_t size = routing.count / routing.n_groups;
  for (int64_t g = 0; g < routing.n_groups; ++g) {
    float first = kLowest, second = kLowest;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      if (scores[e] > first) {
        second = first, first = scores[e];
      } else if (scores[e] > second) {
        second = scores[e];
      }
    }
    sums[g] = comparable(first + second);
  }
  for (int64_t n = 0; n < routing.n_used; ++n) sums[largest_of(sums, routing.n_groups)] = -kInfinity;
  for (int64_t e = 0; e < routing.count; ++e) scores[e] = sums[e / size] == -kInfinity ? scores[e] : kLowest;
}

// Chooses different experts for a row, and their weights, from its scores; `work` has room for two rows of scores.
template <typename scalar_t>
REALHF_INLINE void choose_experts(const Routing& routing, const scalar_t* bias, const float* scores, float* work,
                                  int64_t* chosen, float* shares) {
  for (int64_t e = 0; e < routing.count; ++e) work[e] = comparable(scores[e] + (bias ? as_float(bias[e]) : 0.0f));
  if (routing.n_used < routing.n_groups) limit_groups(routing, work, work + routing.count);
  float total = 0.0f;
  for (int64_t i = 0; i < routing.top_k; ++i) {
    chosen[i] = largest_of(work, routing.count);
    shares[i] = scores[chosen[i]];
    total += shares[i];
    work[chosen[i]] = -kInfinity;
  }
  const float divisor = routing.renormalises ? total + (routing.is_sigmoid ? kSmallest : 0.0f) : 1.0f;
  for (int64_t i = 0; i < routing.top_k; ++i) shares[i] = shares[i] / divisor * routing.scale;
}

// Sorts the pairs of a row and one of its experts by expert: those of expert e are pairs[starts[e]..starts[e + 1]].
REALHF_INLINE void sort_pairs(const Routing& routing, int64_t rows, Buffers& buffers) {
  const int64_t n_pairs = rows * routing.top_k;
  int64_t* const starts = buffers.starts;
  for (int64_t e = 0; e < routing.count + 2; ++e) starts[e] = 0;
  for (int64_t i = 0; i < n_pairs; ++i) ++starts[buffers.chosen[i] + 2];
  for (int64_t e = 2; e < routing.count + 2; ++e) starts[e] += starts[e - 1];
  for (int64_t i = 0; i < n_pairs; ++i) buffers.pairs[starts[buffers.chosen[i] + 1]++] = i;
}

// product += the outputs of one expert for its rows, times their weights.
template <typename scalar_t>
REALHF_INLINE void add_expert(const Shape& shape, const Layer<scalar_t>& layer, int64_t place, int64_t count,
                              const int64_t* pairs, Buffers& buffers) {
  const Routing& routing = shape.routing;
  const int64_t hidden = shape.hidden, across = layer.up.outs;
  const Matrix<scalar_t> up = layer.up.part(place * across, across), down = layer.down.part(place * hidden, hidden);
  for (int64_t i = 0; i < count; ++i) {
    convert(buffers.picked + i * hidden, buffers.inner + pairs[i] / routing.top_k * hidden, hidden);
  }
  linear(buffers.team, up, count, buffers.picked, false, buffers.projected, across);
  activate(shape, routing.inner, count, buffers.projected);
  linear(buffers.team, down, count, buffers.projected, false, buffers.outputs, hidden);
  for (int64_t i = 0; i < count; ++i) {
    float* const to = buffers.product + pairs[i] / routing.top_k * hidden;
    const float *const from = buffers.outputs + i * hidden, share = buffers.shares[pairs[i]];
    for (int64_t c = 0; c < hidden; c += kLanes) store(to + c, load(to + c) + load(from + c) * share);
  }
}

// product = the MLP beside the experts, for all rows, times the sigmoid of its gate; zero without one.
template <typename scalar_t>
REALHF_INLINE void shared_expert(const Shape& shape, const Router<scalar_t>& router, int64_t rows, Buffers& buffers) {
  const int64_t hidden = shape.hidden, inner = shape.routing.shared_inner;
  if (inner == 0) {
    for (int64_t c = 0; c < rows * hidden; c += kLanes) store(buffers.product + c, Floats{});
    return;
  }
  linear(buffers.team, router.shared_up, rows, buffers.inner, false, buffers.projected, router.shared_up.outs);
  activate(shape, inner, rows, buffers.projected);
  linear(buffers.team, router.shared_down, rows, buffers.projected, false, buffers.product, hidden);
  for (int64_t r = 0; router.shared_gate && r < rows; ++r) {
    Floats dots = {};
    for (int64_t c = 0; c < hidden; c += kLanes) {
      dots += load(buffers.inner + r * hidden + c) * load(router.shared_gate + c);
    }
    const float gate = sigmoid(Floats{} + horizontal_sum(dots))[0];
    float* const to = buffers.product + r * hidden;
    for (int64_t c = 0; c < hidden; c += kLanes) store(to + c, load(to + c) * gate);
  }
}

// product = the weighted sum over the experts of every row of `inner` that this worker has, in the order of the experts.
template <typename scalar_t>
REALHF_INLINE void run_experts(const Shape& shape, const Layer<scalar_t>& layer, int64_t first, int64_t rows,
                               Buffers& buffers) {
  const Routing& routing = shape.routing;
  const int64_t across = layer.router.product.outs, top_k = routing.top_k;
  linear(buffers.team, layer.router.product, rows, buffers.inner, false, buffers.logits, across);
  for (int64_t r = 0; r < rows; ++r) {
    float* const row = buffers.logits + r * across;
    int64_t* const chosen = buffers.chosen + r * top_k;
    score_experts(routing, row);
    choose_experts(routing, layer.router.choice_bias, row, buffers.work, chosen, buffers.shares + r * top_k);
    for (int64_t i = 0; layer.chosen && i < top_k; ++i) layer.chosen[(first + r) * top_k + i] = chosen[i];
  }
  sort_pairs(routing, rows, buffers);
  shared_expert(shape, layer.router, rows, buffers);
  for (int64_t e = routing.first; e < routing.first + routing.n_own; ++e) {
    const int64_t begin = buffers.starts[e], count = buffers.starts[e + 1] - begin;
    if (count > 0) add_expert(shape, layer, e - routing.first, count, buffers.pairs + begin, buffers);
  }
}
