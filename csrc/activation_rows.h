// Activations and their gradients, row by row; compiled for every instruction set by multi_isa.h.

// One vector of a row; `up` is the second half of a gated row, or null.
template <Activation activation, typename scalar_t, typename Lanes>
REALHF_INLINE void forward_some(const scalar_t* x, const scalar_t* up, int64_t i, const Lanes& lanes, scalar_t* out) {
  const Floats value = activated<activation>(lanes.load(x + i));
  lanes.store(out + i, up ? value * lanes.load(up + i) : value);
}

template <Activation activation, typename scalar_t>
REALHF_NOINLINE void forward_row(const scalar_t* x, const scalar_t* up, int64_t inner, scalar_t* out) {
  int64_t i = 0;
  for (; i + kLanes <= inner; i += kLanes) forward_some<activation>(x, up, i, FullVec{}, out);
  if (i < inner) forward_some<activation>(x, up, i, PartialVec{inner - i}, out);
}

template <Activation activation, typename scalar_t, typename Lanes>
REALHF_INLINE void backward_some(const scalar_t* grad, const scalar_t* x, const scalar_t* up, int64_t i,
                                 const Lanes& lanes, scalar_t* x_grad, scalar_t* up_grad) {
  Floats along = lanes.load(grad + i);
  const Slope found = activated_with_slope<activation>(lanes.load(x + i));
  if (up) {
    lanes.store(up_grad + i, along * found.value);
    along *= lanes.load(up + i);
  }
  lanes.store(x_grad + i, along * found.slope);
}

template <Activation activation, typename scalar_t>
REALHF_NOINLINE void backward_row(const scalar_t* grad, const scalar_t* x, const scalar_t* up, int64_t inner,
                                  scalar_t* x_grad, scalar_t* up_grad) {
  int64_t i = 0;
  for (; i + kLanes <= inner; i += kLanes) {
    backward_some<activation>(grad, x, up, i, FullVec{}, x_grad, up_grad);
  }
  if (i < inner) backward_some<activation>(grad, x, up, i, PartialVec{inner - i}, x_grad, up_grad);
}
