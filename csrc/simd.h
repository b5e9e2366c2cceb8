// SIMD vectors for CPU kernels, compiled for several instruction sets and selected at run time.
#pragma once

#include <cstdint>  // defines __GLIBC__ with glibc
#include <cstring>
#include <limits>

// Compiles a function for any x86-64, for AVX2 and for AVX-512; the loader picks one. All give the same bits, because
// the build forbids contraction of a*b+c (-ffp-contract=off) and the order of additions is written out.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define REALHF_SIMD_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define REALHF_SIMD_CLONES
#endif

// Part of such a function, inlined into every clone.
#define REALHF_INLINE static inline __attribute__((always_inline))
#define REALHF_INLINE_MEMBER inline __attribute__((always_inline))
#define REALHF_BODY __attribute__((always_inline))  // of a lambda

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors pass between inlined functions only

namespace realhf {

constexpr int64_t kLanes = 8;     // per vector; the compiler spills vectors wider than a register to memory
constexpr int64_t kPadding = 16;  // row sizes are padded to this multiple for the widest registers
constexpr float kInfinity = std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));  // for sums and shifts of bits, which may wrap around
typedef uint16_t Shorts __attribute__((vector_size(2 * kLanes)));

struct BFloat16 {  // the upper half of a float32
  uint16_t bits;
};

// Selects use bit masks: the compiler scalarises selects of vectors wider than a register, which is ten times slower.
// A cast between vectors keeps the bits.
REALHF_INLINE Ints is_negative(const Ints& x) { return x >> 31; }  // all bits set, or none
REALHF_INLINE Ints is_less(const Floats& a, const Floats& b) { return is_negative((Ints)(a - b)); }  // not for NaN
REALHF_INLINE Ints is_nan(const Floats& x) { return is_negative(0x7f800000 - ((Ints)x & 0x7fffffff)); }
REALHF_INLINE Ints select(const Ints& mask, const Ints& yes, const Ints& no) { return (yes & mask) | (no & ~mask); }
REALHF_INLINE Floats select(const Ints& mask, const Floats& yes, const Floats& no) {
  return (Floats)select(mask, (Ints)yes, (Ints)no);
}
REALHF_INLINE Floats abs_of(const Floats& x) { return (Floats)((Ints)x & 0x7fffffff); }
REALHF_INLINE Floats copysign_of(const Floats& size, const Floats& x) {
  return (Floats)((Ints)size | ((Ints)x & static_cast<int32_t>(0x80000000)));
}

// An unaligned vector in memory: with memcpy, the compiler would copy wide vectors through the stack.
typedef float FloatsThere __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

REALHF_INLINE Floats load(const float* from) { return *reinterpret_cast<const FloatsThere*>(from); }

REALHF_INLINE Floats load(const BFloat16* from) {
  Shorts halves;
  std::memcpy(&halves, from, sizeof halves);
  const Words bits = __builtin_convertvector(halves, Words) << 16;
  return (Floats)bits;
}

REALHF_INLINE float as_float(float value) { return value; }
REALHF_INLINE float as_float(const BFloat16& value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

REALHF_INLINE void store(float* to, const Floats& lanes) { *reinterpret_cast<FloatsThere*>(to) = lanes; }

REALHF_INLINE void store(BFloat16* to, const Floats& lanes) {  // rounds to nearest even; NaN stays NaN
  const Words bits = (Words)lanes, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Ints halves_of = select(is_nan(lanes), (Ints)((bits >> 16) | 0x40), (Ints)rounded);
  const Shorts halves = __builtin_convertvector(halves_of, Shorts);
  std::memcpy(to, &halves, sizeof halves);
}

// Loads `count` lanes and fills the others with `fill`, for the end of a row.
template <typename scalar_t>
REALHF_INLINE Floats load_some(const scalar_t* from, int64_t count, scalar_t fill) {
  scalar_t padded[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) padded[i] = i < count ? from[i] : fill;
  return load(padded);
}

// Loads up to kLanes elements of a row with `count` elements left (<= 0: none); the other lanes are zero.
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

// Loads and stores whole vectors, or the first `count` lanes at the end of a row.
struct FullVec {
  template <typename scalar_t>
  REALHF_INLINE_MEMBER Floats load(const scalar_t* from) const {
    return realhf::load(from);
  }
  template <typename scalar_t>
  REALHF_INLINE_MEMBER void store(scalar_t* to, const Floats& lanes) const {
    realhf::store(to, lanes);
  }
};

struct PartialVec {
  int64_t count;
  template <typename scalar_t>
  REALHF_INLINE_MEMBER Floats load(const scalar_t* from) const {
    return load_some(from, count, scalar_t{});
  }
  template <typename scalar_t>
  REALHF_INLINE_MEMBER void store(scalar_t* to, const Floats& lanes) const {
    store_upto(to, lanes, count);
  }
};

// Calls `body(i, access)` for every vector of a row; the partial last one is a separate instantiation for speed.
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

// e^x for x <= 88, to about 1e-7; exactly 0 below -87.7, where float32 has no normal numbers; NaN stays NaN.
// Range reduction by powers of two with the polynomial of Cephes' expf, summed in pairs for a shorter dependency chain.
// The lower bound is a comparison, not a bit mask, because it must select x for a NaN.
REALHF_INLINE Floats exp_of(const Floats& x) {
  const Floats smallest = Floats{} - 88.0f;
  const Floats bounded = x < smallest ? smallest : x;
  const Floats shifted = bounded * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the integer is in the low bits
  const Floats power = shifted - 12582912.0f;
  const Floats r = (bounded - power * 0.693359375f) - power * -2.12194440e-4f, square = r * r;
  const Floats high = (r * 1.9875691500e-4f + 1.3981999507e-3f) * square + (r * 8.3334519073e-3f + 4.1665795894e-2f);
  const Floats poly = high * square + (r * 1.6666665459e-1f + 5.0000001201e-1f);
  const Floats mantissa = poly * square + (r + 1.0f);
  const Words scale = ((Words)shifted + 127) << 23;  // 2^power; 0 where that is -127
  return mantissa * (Floats)scale;
}

}  // namespace realhf
