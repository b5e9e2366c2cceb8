// A[t] = sum[t] + link[t] * A[t+1], eight steps at a time, in double: what the kernels of advantages for CPUs share.
#pragma once

#include "simd.h"

namespace realhf {

constexpr int64_t kSteps = 8;

typedef double Doubles __attribute__((vector_size(8 * kSteps)));
typedef int64_t Longs __attribute__((vector_size(8 * kSteps)));
typedef float EightFloats __attribute__((vector_size(4 * kSteps)));
typedef int8_t Bytes __attribute__((vector_size(kSteps)));

REALHF_INLINE Doubles load_steps(const double* from) {
  Doubles steps;
  std::memcpy(&steps, from, sizeof steps);
  return steps;
}

REALHF_INLINE Doubles load_steps(const float* from) {
  EightFloats steps;
  std::memcpy(&steps, from, sizeof steps);
  return __builtin_convertvector(steps, Doubles);
}

REALHF_INLINE Longs load_steps(const bool* from) {  // all bits set where true
  Bytes steps;
  std::memcpy(&steps, from, sizeof steps);
  return __builtin_convertvector(steps, Longs) != 0;
}

REALHF_INLINE void store_steps(double* to, const Doubles& steps) { std::memcpy(to, &steps, sizeof steps); }

REALHF_INLINE void store_steps(float* to, const Doubles& steps) {
  const EightFloats rounded = __builtin_convertvector(steps, EightFloats);
  std::memcpy(to, &rounded, sizeof rounded);
}

// The step `span` later, and `fill` where that is beyond the eight.
template <int span>
REALHF_INLINE Doubles later_steps(const Doubles& steps, double fill) {
  const Longs from = Longs{0, 1, 2, 3, 4, 5, 6, 7} + span;
  return __builtin_shuffle(steps, Doubles{} + fill, from > 8 ? Longs{} + 8 : from);
}

// Makes eight steps those of a scan that ends with them: A[t] = sum[t] + link[t] * (A after the eight).
REALHF_INLINE void scan_steps(Doubles& sum, Doubles& link) {
  sum += link * later_steps<1>(sum, 0.0);
  link *= later_steps<1>(link, 1.0);
  sum += link * later_steps<2>(sum, 0.0);
  link *= later_steps<2>(link, 1.0);
  sum += link * later_steps<4>(sum, 0.0);
  link *= later_steps<4>(link, 1.0);
}

// The same for one link everywhere: its powers are worked out once.
struct Decay {
  double once, twice, four;
  Doubles reach;  // of A after the eight, at each
};

REALHF_INLINE Decay powers_of(double decay) {
  Decay powers = {decay, decay * decay, (decay * decay) * (decay * decay), {}};
  double reach = 1.0;
  for (int64_t i = kSteps - 1; i >= 0; --i) powers.reach[i] = reach *= decay;
  return powers;
}

REALHF_INLINE void scan_steps(Doubles& sum, const Decay& decay) {
  sum += decay.once * later_steps<1>(sum, 0.0);
  sum += decay.twice * later_steps<2>(sum, 0.0);
  sum += decay.four * later_steps<4>(sum, 0.0);
}

// The first `count` steps of a row, as the last of eight.
template <typename scalar_t>
REALHF_INLINE void pad_steps(const scalar_t* from, int64_t count, scalar_t* padded) {
  for (int64_t i = 0; i < kSteps; ++i) padded[i] = i < kSteps - count ? scalar_t{} : from[i - (kSteps - count)];
}

}  // namespace realhf
