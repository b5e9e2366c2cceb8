// One row of a step of the gated delta rule; compiled for every instruction set by multi_isa.h.

constexpr int64_t kColumns = 4;  // vectors of a state's columns that are in registers together

// mixed[channels] = silu of the convolution of the last inputs, which then move by one.
template <typename scalar_t>
REALHF_INLINE void convolve(const DeltaShape& shape, const float* conv, const scalar_t* x, scalar_t* tails,
                            float* mixed) {
  const int64_t channels = shape.channels(), n_tails = shape.taps - 1;
  for (int64_t c = 0; c < channels; c += kLanes) {
    const Floats newest = load(x + c);
    Floats sum = newest * load(conv + n_tails * channels + c);
    for (int64_t t = 0; t < n_tails; ++t) {
      scalar_t* const tail = tails + t * channels + c;
      sum += load(tail) * load(conv + t * channels + c);
      store(tail, t + 1 < n_tails ? load(tail + channels) : newest);
    }
    store(mixed + c, activated<Activation::silu>(sum));
  }
}

// Divides `count` heads by their norms and multiplies them by `scale`.
REALHF_INLINE void normalise_heads(int64_t count, int64_t dim, float scale, float* heads) {
  for (int64_t h = 0; h < count; ++h, heads += dim) {
    Floats squares = {};
    for (int64_t c = 0; c < dim; c += kLanes) squares += load(heads + c) * load(heads + c);
    const float factor = scale / __builtin_sqrtf(horizontal_sum(squares) + kNormEps);
    for (int64_t c = 0; c < dim; c += kLanes) store(heads + c, load(heads + c) * factor);
  }
}

// Some columns of a head's state [key_dim, value_dim], which change by the decay, then by the rate times the key's error.
template <int kVectors>
REALHF_INLINE void update_columns(int64_t key_dim, int64_t value_dim, float decay, float rate, float along,
                                  const float* q, const float* k, const float* v, float* state, float* out) {
  Floats read[kVectors] = {}, asked[kVectors] = {}, change[kVectors];
  for (int64_t i = 0; i < key_dim; ++i) {
    for (int n = 0; n < kVectors; ++n) {
      const Floats some = load(state + i * value_dim + n * kLanes);
      read[n] += some * k[i];
      asked[n] += some * q[i];
    }
  }
  for (int n = 0; n < kVectors; ++n) {
    change[n] = (load(v + n * kLanes) - read[n] * decay) * rate;
    store(out + n * kLanes, asked[n] * decay + change[n] * along);
  }
  for (int64_t i = 0; i < key_dim; ++i) {
    for (int n = 0; n < kVectors; ++n) {
      float* const at = state + i * value_dim + n * kLanes;
      store(at, load(at) * decay + change[n] * k[i]);
    }
  }
}

REALHF_NOINLINE void update_state(const DeltaShape& shape, float decay, float rate, const float* q, const float* k,
                                  const float* v, float* state, float* out) {
  Floats products = {};
  for (int64_t c = 0; c < shape.key_dim; c += kLanes) products += load(q + c) * load(k + c);
  const float along = horizontal_sum(products);
  int64_t c = 0;
  for (; c + kColumns * kLanes <= shape.value_dim; c += kColumns * kLanes) {
    update_columns<kColumns>(shape.key_dim, shape.value_dim, decay, rate, along, q, k, v + c, state + c, out + c);
  }
  for (; c < shape.value_dim; c += kLanes) {
    update_columns<1>(shape.key_dim, shape.value_dim, decay, rate, along, q, k, v + c, state + c, out + c);
  }
}

template <typename scalar_t>
REALHF_INLINE void step(const DeltaShape& shape, const DeltaStep<scalar_t>& given, int64_t row, float* mixed,
                        float* outputs) {
  const int64_t dim = shape.value_dim, channels = shape.channels(), ratio = shape.n_values / shape.n_keys;
  const scalar_t* const x = given.projected + row * shape.width();
  const scalar_t *const gates = x + channels, *const rates = gates + shape.values();
  convolve(shape, given.conv, x, given.tails + row * (shape.taps - 1) * channels, mixed);
  float *const keys = mixed + shape.keys(), *const values = keys + shape.keys();
  normalise_heads(shape.n_keys, shape.key_dim, 1.0f / __builtin_sqrtf(shape.key_dim), mixed);
  normalise_heads(shape.n_keys, shape.key_dim, 1.0f, keys);
  for (int64_t h = 0; h < shape.n_values; ++h) {
    const float shifted = as_float(rates[shape.n_values + h]) + as_float(given.dt_bias[h]);
    const float softplus = shifted > 20.0f ? shifted : __builtin_log1pf(__builtin_expf(shifted));
    const float decay = __builtin_expf(-__builtin_expf(as_float(given.a_log[h])) * softplus);
    const float rate = sigmoid(Floats{} + as_float(rates[h]))[0];
    const int64_t of_key = h / ratio * shape.key_dim;
    float *const state = given.states + (row * shape.n_values + h) * shape.key_dim * dim, *const out = outputs + h * dim;
    update_state(shape, decay, rate, mixed + of_key, keys + of_key, values + h * dim, state, out);
    Floats squares = {};
    for (int64_t c = 0; c < dim; c += kLanes) squares += load(out + c) * load(out + c);
    const float scale = 1.0f / __builtin_sqrtf(horizontal_sum(squares) / dim + shape.eps);
    for (int64_t c = 0; c < dim; c += kLanes) {
      const Floats gate = activated<Activation::silu>(load(gates + h * dim + c));
      store(given.result + row * shape.values() + h * dim + c, load(out + c) * scale * load(given.norm + c) * gate);
    }
  }
}

void step_row(const DeltaShape& shape, const DeltaStep<float>& given, int64_t row, float* mixed, float* outputs) {
  step(shape, given, row, mixed, outputs);
}

void step_row(const DeltaShape& shape, const DeltaStep<BFloat16>& given, int64_t row, float* mixed, float* outputs) {
  step(shape, given, row, mixed, outputs);
}
