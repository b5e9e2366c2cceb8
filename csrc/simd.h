// What a CPU kernel needs to use wide registers where the machine has them and still run where it has not.
#pragma once

#include <cstdint>  // brings __GLIBC__, if anything does
#include <cstring>
#include <limits>

// Compiles a function for any x86-64, for AVX2 and for AVX-512; the loader picks one. All give the same bits, because
// the build forbids contraction of a*b+c (-ffp-contract=off) and the order of additions is written out.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define REALHF_SIMD_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define REALHF_SIMD_CLONES
#endif

// A part of such a function: compiled into each of its clones.
#define REALHF_INLINE static inline __attribute__((always_inline))
#define REALHF_INLINE_MEMBER inline __attribute__((always_inline))
#define REALHF_BODY __attribute__((always_inline))  // of a lambda

#pragma GCC diagnostic ignored "-Wpsabi"  // wide vectors pass between inlined functions only

namespace realhf {

constexpr int64_t kLanes = 8;      // of a vector; the compiler keeps vectors that are wider than a register in memory
constexpr int64_t kPadding = 16;   // what rows are made a multiple of where the widest registers work on them
constexpr float kInfinity = std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Shorts __attribute__((vector_size(2 * kLanes)));

struct BFloat16 {  // the upper half of a float32
  uint16_t bits;
};

// Choices are made with masks of bits: the compiler makes selects of vectors that are wider than a register number by
// number, ten times slower. A cast between vectors keeps the bits.
REALHF_INLINE Ints is_negative(const Ints& x) { return x >> 31; }                         // all bits, or none
REALHF_INLINE Ints is_less(const Floats& a, const Floats& b) { return is_negative((Ints)(a - b)); }  // of no NaN
REALHF_INLINE Ints is_nan(const Floats& x) { return is_negative(0x7f800000 - ((Ints)x & 0x7fffffff)); }
REALHF_INLINE Ints select(const Ints& mask, const Ints& yes, const Ints& no) { return (yes & mask) | (no & ~mask); }
REALHF_INLINE Floats select(const Ints& mask, const Floats& yes, const Floats& no) {
  return (Floats)select(mask, (Ints)yes, (Ints)no);
}
REALHF_INLINE Floats abs_of(const Floats& x) { return (Floats)((Ints)x & 0x7fffffff); }
REALHF_INLINE Floats copysign_of(const Floats& size, const Floats& x) {
  return (Floats)((Ints)size | ((Ints)x & static_cast<int32_t>(0x80000000)));
}

// Lanes where they lie in memory: copied byte by byte, a vector that is wider than a register would take to the stack.
typedef float FloatsThere __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

REALHF_INLINE Floats load(const float* from) { return *reinterpret_cast<const FloatsThere*>(from); }

REALHF_INLINE Floats load(const BFloat16* from) {
  Shorts halves;
  std::memcpy(&halves, from, sizeof halves);
  const Ints bits = __builtin_convertvector(halves, Ints) << 16;
  return (Floats)bits;
}

REALHF_INLINE void store(float* to, const Floats& lanes) { *reinterpret_cast<FloatsThere*>(to) = lanes; }

REALHF_INLINE void store(BFloat16* to, const Floats& lanes) {  // rounds to nearest, to even; a NaN stays one
  const Ints bits = (Ints)lanes;
  const Ints rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Shorts halves = __builtin_convertvector(select(is_nan(lanes), (bits >> 16) | 0x40, rounded), Shorts);
  std::memcpy(to, &halves, sizeof halves);
}

// The lanes from..from+count, the others filled with `fill`; for the end of a row.
template <typename scalar_t>
REALHF_INLINE Floats load_some(const scalar_t* from, int64_t count, scalar_t fill) {
  scalar_t padded[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) padded[i] = i < count ? from[i] : fill;
  return load(padded);
}

// Up to kLanes numbers of a row that ends after `count`, or has ended; behind are zeros, and nothing is written.
template <typename scalar_t>
REALHF_INLINE Floats load_upto(const scalar_t* from, int64_t count) {
  return count >= kLanes ? load(from) : load_some(from, count, scalar_t{});
}

template <typename scalar_t>
REALHF_INLINE void store_upto(scalar_t* to, const Floats& lanes, int64_t count) {
  if (count >= kLanes) return store(to, lanes);
  scalar_t end[kLanes];
  store(end, lanes);
  std::memcpy(to, end, count * sizeof(scalar_t));
}

// How to take a run of lanes from memory and put it there: all of them, or the first `count` at the end of a row.
struct FullVec {
  template <typename scalar_t>
  REALHF_INLINE_MEMBER Floats load(const scalar_t* from) const { return realhf::load(from); }
  template <typename scalar_t>
  REALHF_INLINE_MEMBER void store(scalar_t* to, const Floats& lanes) const { realhf::store(to, lanes); }
};

struct PartialVec {
  int64_t count;
  template <typename scalar_t>
  REALHF_INLINE_MEMBER Floats load(const scalar_t* from) const { return load_some(from, count, scalar_t{}); }
  template <typename scalar_t>
  REALHF_INLINE_MEMBER void store(scalar_t* to, const Floats& lanes) const { store_upto(to, lanes, count); }
};

// Calls `body(i, lanes)` for every run of lanes in a row, its end by itself: one body for both would choose in memory.
template <typename Body>
REALHF_INLINE void for_each_vec(int64_t size, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) body(i, FullVec{});
  if (i < size) body(i, PartialVec{size - i});
}

REALHF_INLINE Floats larger(const Floats& a, const Floats& b) { return select(is_less(a, b), b, a); }

REALHF_INLINE float largest_lane(const Floats& lanes) {
  float most = lanes[0];
  for (int i = 1; i < kLanes; ++i) most = lanes[i] > most ? lanes[i] : most;
  return most;
}

REALHF_INLINE double sum_of_lanes(const Floats& lanes) {
  double sum = 0.0;
  for (int i = 0; i < kLanes; ++i) sum += lanes[i];
  return sum;
}

// e^x for x <= 88, to about 1e-7; exactly 0 below -87.7, where float32 has no more normal numbers; a NaN stays one.
// Range reduction by powers of two; the polynomial is that of Cephes' expf, summed in pairs: the chain is shorter. The
// lower bound is a comparison, not a mask of bits, since of a NaN it must choose x.
REALHF_INLINE Floats exp_of(const Floats& x) {
  const Floats smallest = Floats{} - 88.0f;
  const Floats bounded = x < smallest ? smallest : x;
  const Floats shifted = bounded * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the integer is in the low bits
  const Floats power = shifted - 12582912.0f;
  const Floats r = (bounded - power * 0.693359375f) - power * -2.12194440e-4f, square = r * r;
  const Floats high = (r * 1.9875691500e-4f + 1.3981999507e-3f) * square + (r * 8.3334519073e-3f + 4.1665795894e-2f);
  const Floats poly = high * square + (r * 1.6666665459e-1f + 5.0000001201e-1f);
  const Floats mantissa = poly * square + (r + 1.0f);
  const Ints scale = ((Ints)shifted + 127) << 23;  // 2^power; 0 where that is -127
  return mantissa * (Floats)scale;
}

}  // namespace realhf
