// The convolution of some channels of all rows, and its gradients; compiled for every instruction set by multi_isa.h.

// The token `back` places before token `t` of a row, if `t` is smaller in the row that it continues, or -1.
REALHF_INLINE int64_t token_before(const ConvRows& table, const DeltaRow& row, int64_t t, int64_t back) {
  if (t >= back) return row.start + t - back;
  if (row.prefix < 0) return -1;
  const DeltaRow& before = table.rows[row.prefix];
  const int64_t place = before.count + t - back;
  return place < 0 ? -1 : before.start + place;
}

template <typename scalar_t>
REALHF_INLINE Floats convolved(const ConvShape& shape, const ConvData<scalar_t>& data, const int64_t* sources,
                               int64_t c) {
  Floats sum = {};
  for (int64_t tap = 0; tap < shape.taps; ++tap) {
    if (sources[tap] < 0) continue;
    sum += load(data.x + sources[tap] * shape.channels + c) * load(data.weight + tap * shape.channels + c);
  }
  return sum;
}

// sources[tap] is the token that a filter's tap reads, -1 for none.
REALHF_INLINE void find_sources(const ConvShape& shape, const ConvRows& table, const DeltaRow& row, int64_t t,
                                int64_t* sources) {
  for (int64_t tap = 0; tap < shape.taps; ++tap) sources[tap] = token_before(table, row, t, shape.taps - 1 - tap);
}

template <typename scalar_t>
REALHF_INLINE void forward_channels(const ConvShape& shape, const ConvRows& table, const ConvData<scalar_t>& data,
                                    int64_t begin, int64_t end) {
  int64_t sources[kMaxTaps];
  for (int64_t number = 0; number < table.count; ++number) {
    const DeltaRow& row = table.rows[number];
    for (int64_t t = 0; t < row.count; ++t) {
      find_sources(shape, table, row, t, sources);
      for (int64_t c = begin; c < end; c += kLanes) {
        const Floats sum = convolved(shape, data, sources, c);
        store(data.y + (row.start + t) * shape.channels + c, activated<Activation::silu>(sum));
      }
    }
  }
}

// Moves the sums of weight gradients of some tokens to the float64 totals.
REALHF_INLINE void flush(const ConvShape& shape, int64_t begin, int64_t end, float* sums, double* totals) {
  for (int64_t tap = 0; tap < shape.taps; ++tap) {
    for (int64_t c = 0; c < end - begin; ++c) {
      totals[tap * shape.channels + begin + c] += sums[tap * kChannels + c];
      sums[tap * kChannels + c] = 0.0f;
    }
  }
}

// A row from its end: `ring` has the gradients of the convolution of the last tokens, `tails` [rows, taps - 1,
// kChannels] those of the last inputs of rows from the rows that continue them, and `sums` those of the weights.
template <typename scalar_t>
REALHF_INLINE void backward_row(const ConvShape& shape, const ConvRows& table, const ConvData<scalar_t>& data,
                                int64_t begin, int64_t end, int64_t number, float* ring, float* tails, float* sums) {
  const DeltaRow& row = table.rows[number];
  const int64_t before = shape.taps - 1, tail = before * kChannels;
  int64_t sources[kMaxTaps];
  for (int64_t i = 0; i < shape.taps * kChannels; ++i) ring[i] = 0.0f;
  for (int64_t t = row.count - 1; t >= 0; --t) {
    find_sources(shape, table, row, t, sources);
    const int64_t at = (row.start + t) * shape.channels;
    for (int64_t c = begin; c < end; c += kLanes) {
      const Floats sum = convolved(shape, data, sources, c);
      const Floats slope = load(data.grad + at + c) * activated_with_slope<Activation::silu>(sum).slope;
      store(ring + t % shape.taps * kChannels + c - begin, slope);
      for (int64_t tap = 0; tap < shape.taps; ++tap) {
        if (sources[tap] < 0) continue;
        float* const of_tap = sums + tap * kChannels + c - begin;
        store(of_tap, load(of_tap) + slope * load(data.x + sources[tap] * shape.channels + c));
        if (t >= before - tap) continue;
        float* const there = tails + row.prefix * tail + (tap + t) * kChannels + c - begin;
        store(there, load(there) + slope * load(data.weight + tap * shape.channels + c));
      }
      Floats total = {};
      for (int64_t tap = 0; tap < shape.taps; ++tap) {
        const int64_t later = t + before - tap;
        if (later >= row.count) continue;
        total += load(ring + later % shape.taps * kChannels + c - begin) * load(data.weight + tap * shape.channels + c);
      }
      if (row.count - t <= before) {
        total += load(tails + number * tail + (before - row.count + t) * kChannels + c - begin);
      }
      store(data.x_grad + at + c, total);
    }
    if (t % kPart == 0) flush(shape, begin, end, sums, data.weight_grad);
  }
}

template <typename scalar_t>
REALHF_INLINE void backward_channels(const ConvShape& shape, const ConvRows& table, const ConvData<scalar_t>& data,
                                     int64_t begin, int64_t end) {
  const int64_t in_tails = table.count * (shape.taps - 1) * kChannels;
  float *const buffers = new float[in_tails + 2 * shape.taps * kChannels](), *const ring = buffers + in_tails;
  float* const sums = ring + shape.taps * kChannels;
  for (int64_t i = 0; i < table.count; ++i) {
    backward_row(shape, table, data, begin, end, table.order[i], ring, buffers, sums);
  }
  delete[] buffers;
}

#define REALHF_CHANNELS_OF(scalar_t)                                                                             \
  void conv_forward(const ConvShape& shape, const ConvRows& table, const ConvData<scalar_t>& data, int64_t begin, \
                    int64_t end) {                                                                               \
    forward_channels(shape, table, data, begin, end);                                                            \
  }                                                                                                              \
  void conv_backward(const ConvShape& shape, const ConvRows& table, const ConvData<scalar_t>& data,             \
                     int64_t begin, int64_t end) {                                                               \
    backward_channels(shape, table, data, begin, end);                                                           \
  }
REALHF_CHANNELS_OF(float)
REALHF_CHANNELS_OF(BFloat16)
#undef REALHF_CHANNELS_OF
