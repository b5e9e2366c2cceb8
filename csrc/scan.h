// A[t] = sum[t] + link[t] * A[t+1], eight steps at a time, in double: what the kernels of advantages for CPUs share.
#pragma once

#include "simd.h"

namespace realhf {

constexpr int64_t kSteps = 8;

typedef double Doubles __attribute__((vector_size(8 * kSteps)));
typedef int64_t Longs __attribute__((vector_size(8 * kSteps)));
typedef uint64_t Words __attribute__((vector_size(8 * kSteps)));
typedef float EightFloats __attribute__((vector_size(4 * kSteps)));

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

// All bits where false, none where true. Without a comparison, whose result compilers may take apart lane by lane.
REALHF_INLINE Longs load_falsehood(const bool* from) {
  uint64_t bytes;
  std::memcpy(&bytes, from, sizeof bytes);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  const Words place = {0, 8, 16, 24, 32, 40, 48, 56};
#else
  const Words place = {56, 48, 40, 32, 24, 16, 8, 0};
#endif
  return (Longs)((((Words{} + bytes) >> place) & 1) - 1);
}

REALHF_INLINE Doubles where(const Longs& mask, const Doubles& steps) { return (Doubles)((Longs)steps & mask); }

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
