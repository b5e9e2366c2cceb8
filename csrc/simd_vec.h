// Vector functions compiled once per instruction set: multi_isa.h includes this file in separate namespaces under
// target pragmas, with REALHF_WIDTH (floats per register) and REALHF_MAX_ROWS (rows of a register tile) defined. It
// calls no inline function of the standard library: the linker could keep the wide instantiation for all callers.

typedef float Vec __attribute__((vector_size(4 * REALHF_WIDTH)));
typedef int32_t VecInts __attribute__((vector_size(4 * REALHF_WIDTH)));
typedef uint32_t VecWords __attribute__((vector_size(4 * REALHF_WIDTH)));
typedef uint16_t VecShorts __attribute__((vector_size(2 * REALHF_WIDTH)));
constexpr int64_t kMaxRows = REALHF_MAX_ROWS;

REALHF_INLINE Vec load_vec(const float* from) {
  Vec lanes;
  __builtin_memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

REALHF_INLINE Vec load_vec(const BFloat16* from) {
  VecShorts halves;
  __builtin_memcpy(&halves, from, sizeof halves);
  const VecWords bits = __builtin_convertvector(halves, VecWords) << 16;
  return (Vec)bits;
}

// c[kRows, kAcross * width] (+)= a[kRows, depth] b[depth, kAcross * width], accumulated in registers
template <int kRows, int kAcross, typename scalar_t>
REALHF_INLINE void gemm_microkernel(int64_t depth, const float* a, int64_t a_row, int64_t a_col, const scalar_t* b,
                                    int64_t b_row, float* c, int64_t c_row, bool add) {
  Vec sums[kRows][kAcross];
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kAcross; ++n) sums[m][n] = add ? load_vec(c + m * c_row + n * REALHF_WIDTH) : Vec{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec right[kAcross];
    for (int n = 0; n < kAcross; ++n) right[n] = load_vec(b + k * b_row + n * REALHF_WIDTH);
    for (int m = 0; m < kRows; ++m) {
      const float left = a[m * a_row + k * a_col];
      for (int n = 0; n < kAcross; ++n) sums[m][n] += right[n] * left;
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kAcross; ++n) __builtin_memcpy(c + m * c_row + n * REALHF_WIDTH, &sums[m][n], sizeof(Vec));
  }
}

template <int kRows, typename scalar_t>
REALHF_INLINE void gemm_rows(int64_t across, int64_t depth, const float* a, int64_t a_row, int64_t a_col,
                             const scalar_t* b, int64_t b_row, float* c, int64_t c_row, bool add) {
  int64_t n = 0;
  for (; kRows <= 2 && n + 4 * REALHF_WIDTH <= across;
       n += 4 * REALHF_WIDTH) {  // more independent sums hide the latency
    gemm_microkernel<kRows, 4>(depth, a, a_row, a_col, b + n, b_row, c + n, c_row, add);
  }
  for (; n + 2 * REALHF_WIDTH <= across; n += 2 * REALHF_WIDTH) {
    gemm_microkernel<kRows, 2>(depth, a, a_row, a_col, b + n, b_row, c + n, c_row, add);
  }
  if (n < across) gemm_microkernel<kRows, 1>(depth, a, a_row, a_col, b + n, b_row, c + n, c_row, add);
}

// c[rows, across] (+)= a[rows, depth] b[depth, across] for rows <= kMaxRows; across is a multiple of REALHF_WIDTH.
template <typename scalar_t>
REALHF_NOINLINE void gemm(int64_t rows, int64_t across, int64_t depth, const float* a, int64_t a_row, int64_t a_col,
                          const scalar_t* b, int64_t b_row, float* c, int64_t c_row, bool add) {
  switch (rows) {
    case 1:
      return gemm_rows<1>(across, depth, a, a_row, a_col, b, b_row, c, c_row, add);
    case 2:
      return gemm_rows<2>(across, depth, a, a_row, a_col, b, b_row, c, c_row, add);
    case 3:
      return gemm_rows<3>(across, depth, a, a_row, a_col, b, b_row, c, c_row, add);
    case 4:
      return gemm_rows<4>(across, depth, a, a_row, a_col, b, b_row, c, c_row, add);
    case 5:
      return gemm_rows<5>(across, depth, a, a_row, a_col, b, b_row, c, c_row, add);
    case 6:
      return gemm_rows<6>(across, depth, a, a_row, a_col, b, b_row, c, c_row, add);
#if REALHF_MAX_ROWS > 6
    case 7:
      return gemm_rows<7>(across, depth, a, a_row, a_col, b, b_row, c, c_row, add);
    case 8:
      return gemm_rows<8>(across, depth, a, a_row, a_col, b, b_row, c, c_row, add);
#endif
  }
}

REALHF_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
REALHF_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

constexpr Ints kNumbers = {0, 1, 2, 3, 4, 5, 6, 7};

// `lanes` where lo <= at + lane < hi, else `other`.
REALHF_INLINE Floats mask_outside(const Floats& lanes, int64_t at, int64_t lo, int64_t hi, float other) {
  const Ints place = kNumbers + static_cast<int32_t>(at);
  const Ints inside = is_negative(place - static_cast<int32_t>(hi)) & ~is_negative(place - static_cast<int32_t>(lo));
  return select(inside, lanes, Floats{} + other);
}

// One step of a transposition: swaps elements whose row and lane numbers differ in this bit.
template <int kBit>
REALHF_INLINE void transpose_step(Vec* lines) {
  VecInts numbers;
  for (int i = 0; i < REALHF_WIDTH; ++i) numbers[i] = i;
  const VecInts odd = (numbers & kBit) != 0;
  const VecInts low = odd ? numbers + (REALHF_WIDTH - kBit) : numbers;
  const VecInts high = odd ? numbers + REALHF_WIDTH : numbers + kBit;
#pragma GCC unroll 16
  for (int i = 0; i < REALHF_WIDTH; ++i) {
    if (i & kBit) continue;
    const Vec first = lines[i], second = lines[i + kBit];
    lines[i] = __builtin_shuffle(first, second, low);
    lines[i + kBit] = __builtin_shuffle(first, second, high);
  }
}

// Transposes a square of REALHF_WIDTH vectors.
REALHF_INLINE void transpose(Vec* lines) {
#if REALHF_WIDTH == 16
  transpose_step<8>(lines);
#endif
#if REALHF_WIDTH >= 8
  transpose_step<4>(lines);
#endif
  transpose_step<2>(lines);
  transpose_step<1>(lines);
}

constexpr Ints kAcross4 = {4, 5, 6, 7, 0, 1, 2, 3}, kAcross2 = {2, 3, 0, 1, 6, 7, 4, 5},
               kAcross1 = {1, 0, 3, 2, 5, 4, 7, 6};

REALHF_INLINE float horizontal_sum(const Floats& lanes) {
  Floats sum = lanes + __builtin_shuffle(lanes, kAcross4);
  sum += __builtin_shuffle(sum, kAcross2);
  sum += __builtin_shuffle(sum, kAcross1);
  return sum[0];
}

REALHF_INLINE float horizontal_max(const Floats& lanes) {
  Floats most = larger(lanes, __builtin_shuffle(lanes, kAcross4));
  most = larger(most, __builtin_shuffle(most, kAcross2));
  most = larger(most, __builtin_shuffle(most, kAcross1));
  return most[0];
}

// Rotates the first `rotary_dim` elements of a head in pairs half of that apart; a sign of -1 inverts the rotation.
REALHF_NOINLINE void rotate(const Rope& rope, int64_t position, float sign, float* head) {
  const int64_t half = rope.rotary_dim / 2;
  const float* cosines = rope.angles + position * rope.rotary_dim;
  const float* sines = cosines + rope.count * rope.rotary_dim;
  int64_t i = 0;
  for (; i + REALHF_WIDTH <= half; i += REALHF_WIDTH) {
    const Vec first = load_vec(head + i), second = load_vec(head + half + i);
    const Vec low = first * load_vec(cosines + i) + second * load_vec(sines + i) * sign;
    const Vec high = second * load_vec(cosines + half + i) + first * load_vec(sines + half + i) * sign;
    __builtin_memcpy(head + i, &low, sizeof low);
    __builtin_memcpy(head + half + i, &high, sizeof high);
  }
  for (; i < half; ++i) {
    const float first = head[i], second = head[half + i];
    head[i] = first * cosines[i] + second * sines[i] * sign;
    head[half + i] = second * cosines[half + i] + first * sines[half + i] * sign;
  }
}
