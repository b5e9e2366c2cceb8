// The scan A[t] = delta[t] + link[t] * A[t+1] of the CPU kernels for advantages, one vector of steps at a time.
// Within a vector, sums use the steps' type, by doubling; the carry between vectors is in double.
#pragma once

#include "simd.h"

namespace realhf {

template <typename scalar_t>
struct Lanes;

template <>
struct Lanes<float> {
  typedef float Steps __attribute__((vector_size(64)));
  typedef int32_t Marks __attribute__((vector_size(64)));
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  typedef uint16_t Shorts __attribute__((vector_size(32)));

  REALHF_INLINE Marks widened(const Bytes& bytes) {
    return __builtin_convertvector(__builtin_convertvector(bytes, Shorts), Marks);
  }
};

template <>
struct Lanes<double> {
  typedef double Steps __attribute__((vector_size(64)));
  typedef int64_t Marks __attribute__((vector_size(64)));
  typedef uint8_t Bytes __attribute__((vector_size(8)));
  typedef uint16_t Shorts __attribute__((vector_size(16)));
  typedef uint32_t Ints __attribute__((vector_size(32)));

  REALHF_INLINE Marks widened(const Bytes& bytes) {
    return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(bytes, Shorts), Ints), Marks);
  }
};

template <typename scalar_t>
struct Register : Lanes<scalar_t> {
  static constexpr int kSteps = 64 / sizeof(scalar_t);
  using typename Lanes<scalar_t>::Steps;
  using typename Lanes<scalar_t>::Marks;  // all bits set if true, none if false
  using typename Lanes<scalar_t>::Bytes;

  REALHF_INLINE Steps load(const scalar_t* from) {
    Steps steps;
    std::memcpy(&steps, from, sizeof steps);
    return steps;
  }

  REALHF_INLINE void store(scalar_t* to, const Steps& steps) { std::memcpy(to, &steps, sizeof steps); }

  // Without a comparison, and widened in steps of two: compilers scalarise other forms.
  REALHF_INLINE Marks load_falsehood(const bool* from) {
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return Lanes<scalar_t>::widened(bytes) - 1;
  }

  REALHF_INLINE Steps where(const Marks& marks, const Steps& steps) { return (Steps)((Marks)steps & marks); }

  // The step or mark `span` later, or `fill` beyond the vector.
  template <int span, typename lanes_t>
  REALHF_INLINE lanes_t later(const lanes_t& lanes, const lanes_t& fill) {
    Marks from;
    for (int i = 0; i < kSteps; ++i) from[i] = i + span < kSteps ? i + span : kSteps;
    return __builtin_shuffle(lanes, fill, from);
  }
};

// The powers of gamma * lam that the scan of one vector needs.
template <typename scalar_t>
struct Decay {
  using R = Register<scalar_t>;
  double gamma;
  double once, all;         // weight of the next step; of the step after the vector at its first step
  scalar_t discount;        // 1 - gamma
  scalar_t spans[4];        // weights of the steps 1, 2, 4 and 8 later
  typename R::Steps reach;  // weight of the step after the vector at each of its steps

  Decay(double gamma, double lam) : gamma(gamma), once(gamma * lam), all(1.0), discount(1.0 - gamma) {
    for (int i = R::kSteps - 1; i >= 0; --i) reach[i] = static_cast<scalar_t>(all *= once);
    double power = once;
    for (scalar_t& span : spans) {
      span = static_cast<scalar_t>(power);
      power *= power;
    }
  }
};

// reward + gamma * after - before. The nearly equal values are subtracted first, exactly: the rounding error is
// proportional to their difference and to 1 - gamma, not to the values.
template <typename scalar_t, typename Steps = typename Register<scalar_t>::Steps>
REALHF_INLINE Steps deltas(const Steps& rewards, const Steps& after, const Steps& before,
                           const Decay<scalar_t>& decay) {
  return (after - before) - decay.discount * after + rewards;
}

// Turns deltas into advantages. The carry is the advantage after the vector on entry, that of its first step on exit;
// one multiply-add is the only dependency between vectors. Unlinked steps never affect each other.
template <typename scalar_t, typename R = Register<scalar_t>>
REALHF_INLINE void scan_steps(typename R::Steps& sum, typename R::Marks linked, const Decay<scalar_t>& decay,
                              double& carry) {
  const typename R::Steps none = {};
  const typename R::Marks all = ~typename R::Marks{};
  sum += R::where(linked, decay.spans[0] * R::template later<1>(sum, none));
  linked &= R::template later<1>(linked, all);
  sum += R::where(linked, decay.spans[1] * R::template later<2>(sum, none));
  linked &= R::template later<2>(linked, all);
  sum += R::where(linked, decay.spans[2] * R::template later<4>(sum, none));
  linked &= R::template later<4>(linked, all);
  if constexpr (R::kSteps > 8) {
    sum += R::where(linked, decay.spans[3] * R::template later<8>(sum, none));
    linked &= R::template later<8>(linked, all);
  }
  const scalar_t after = static_cast<scalar_t>(carry);
  carry = sum[0] + (linked[0] ? decay.all * carry : 0.0);
  sum += R::where(linked, decay.reach * after);
}

}  // namespace realhf
