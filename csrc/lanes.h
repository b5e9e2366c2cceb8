// What rows of numbers are worked on with, compiled once for every width of registers: each_width.h includes this in
// namespaces of its own, below target pragmas, with REALHF_WIDTH (floats in a register) and REALHF_TALL (rows of a
// product that are held in registers) set. No function of the standard library is called from here: the linker could
// keep its wide copy for everyone.

typedef float Wide __attribute__((vector_size(4 * REALHF_WIDTH)));
typedef int32_t WideInts __attribute__((vector_size(4 * REALHF_WIDTH)));
typedef uint16_t WideShorts __attribute__((vector_size(2 * REALHF_WIDTH)));
constexpr int64_t kTall = REALHF_TALL;

REALHF_INLINE Wide load_wide(const float* from) {
  Wide lanes;
  __builtin_memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

REALHF_INLINE Wide load_wide(const BFloat16* from) {
  WideShorts halves;
  __builtin_memcpy(&halves, from, sizeof halves);
  const WideInts bits = __builtin_convertvector(halves, WideInts) << 16;
  return (Wide)bits;
}

// c[M, kAcross * width] (+)= a[M, depth] b[depth, kAcross * width], all of it in registers
template <int kRows, int kAcross, typename scalar_t>
REALHF_INLINE void tile_product(int64_t depth, const float* a, int64_t a_row, int64_t a_col, const scalar_t* b,
                                int64_t b_row, float* c, int64_t c_row, bool add) {
  Wide sums[kRows][kAcross];
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kAcross; ++n) sums[m][n] = add ? load_wide(c + m * c_row + n * REALHF_WIDTH) : Wide{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    Wide right[kAcross];
    for (int n = 0; n < kAcross; ++n) right[n] = load_wide(b + k * b_row + n * REALHF_WIDTH);
    for (int m = 0; m < kRows; ++m) {
      const float left = a[m * a_row + k * a_col];
      for (int n = 0; n < kAcross; ++n) sums[m][n] += right[n] * left;
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kAcross; ++n) __builtin_memcpy(c + m * c_row + n * REALHF_WIDTH, &sums[m][n], sizeof(Wide));
  }
}

template <int kRows, typename scalar_t>
REALHF_INLINE void rows_product(int64_t across, int64_t depth, const float* a, int64_t a_row, int64_t a_col,
                                const scalar_t* b, int64_t b_row, float* c, int64_t c_row, bool add) {
  int64_t n = 0;
  for (; kRows <= 2 && n + 4 * REALHF_WIDTH <= across; n += 4 * REALHF_WIDTH) {  // more sums: each waits for its last
    tile_product<kRows, 4>(depth, a, a_row, a_col, b + n, b_row, c + n, c_row, add);
  }
  for (; n + 2 * REALHF_WIDTH <= across; n += 2 * REALHF_WIDTH) {
    tile_product<kRows, 2>(depth, a, a_row, a_col, b + n, b_row, c + n, c_row, add);
  }
  if (n < across) tile_product<kRows, 1>(depth, a, a_row, a_col, b + n, b_row, c + n, c_row, add);
}

// c[rows, across] (+)= a[rows, depth] b[depth, across] for rows <= kTall; across is a multiple of a register's width.
template <typename scalar_t>
REALHF_ONCE void product(int64_t rows, int64_t across, int64_t depth, const float* a, int64_t a_row, int64_t a_col,
                         const scalar_t* b, int64_t b_row, float* c, int64_t c_row, bool add) {
  switch (rows) {
    case 1: return rows_product<1>(across, depth, a, a_row, a_col, b, b_row, c, c_row, add);
    case 2: return rows_product<2>(across, depth, a, a_row, a_col, b, b_row, c, c_row, add);
    case 3: return rows_product<3>(across, depth, a, a_row, a_col, b, b_row, c, c_row, add);
    case 4: return rows_product<4>(across, depth, a, a_row, a_col, b, b_row, c, c_row, add);
    case 5: return rows_product<5>(across, depth, a, a_row, a_col, b, b_row, c, c_row, add);
    case 6: return rows_product<6>(across, depth, a, a_row, a_col, b, b_row, c, c_row, add);
#if REALHF_TALL > 6
    case 7: return rows_product<7>(across, depth, a, a_row, a_col, b, b_row, c, c_row, add);
    case 8: return rows_product<8>(across, depth, a, a_row, a_col, b, b_row, c, c_row, add);
#endif
  }
}

REALHF_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
REALHF_INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

constexpr Ints kNumbers = {0, 1, 2, 3, 4, 5, 6, 7};

// `lanes` where lo <= at + lane < hi, else `other`.
REALHF_INLINE Floats within(const Floats& lanes, int64_t at, int64_t lo, int64_t hi, float other) {
  const Ints place = kNumbers + static_cast<int32_t>(at);
  const Ints inside = below_zero(place - static_cast<int32_t>(hi)) & ~below_zero(place - static_cast<int32_t>(lo));
  return choose(inside, lanes, Floats{} + other);
}

// One step of a transposition: lanes and lines change places where their numbers differ in this bit.
template <int kBit>
REALHF_INLINE void turn_bit(Wide* lines) {
  WideInts numbers;
  for (int i = 0; i < REALHF_WIDTH; ++i) numbers[i] = i;
  const WideInts odd = (numbers & kBit) != 0;
  const WideInts low = odd ? numbers + (REALHF_WIDTH - kBit) : numbers;
  const WideInts high = odd ? numbers + REALHF_WIDTH : numbers + kBit;
#pragma GCC unroll 16
  for (int i = 0; i < REALHF_WIDTH; ++i) {
    if (i & kBit) continue;
    const Wide first = lines[i], second = lines[i + kBit];
    lines[i] = __builtin_shuffle(first, second, low);
    lines[i + kBit] = __builtin_shuffle(first, second, high);
  }
}

// As many lines as a register has lanes change places with the lanes.
REALHF_INLINE void turn(Wide* lines) {
#if REALHF_WIDTH == 16
  turn_bit<8>(lines);
#endif
#if REALHF_WIDTH >= 8
  turn_bit<4>(lines);
#endif
  turn_bit<2>(lines);
  turn_bit<1>(lines);
}

constexpr Ints kAcross4 = {4, 5, 6, 7, 0, 1, 2, 3}, kAcross2 = {2, 3, 0, 1, 6, 7, 4, 5},
               kAcross1 = {1, 0, 3, 2, 5, 4, 7, 6};

REALHF_INLINE float total_of(const Floats& lanes) {
  Floats sum = lanes + __builtin_shuffle(lanes, kAcross4);
  sum += __builtin_shuffle(sum, kAcross2);
  sum += __builtin_shuffle(sum, kAcross1);
  return sum[0];
}

REALHF_INLINE float most_of(const Floats& lanes) {
  Floats most = larger(lanes, __builtin_shuffle(lanes, kAcross4));
  most = larger(most, __builtin_shuffle(most, kAcross2));
  most = larger(most, __builtin_shuffle(most, kAcross1));
  return most[0];
}

// The first `turning` numbers of a head turn, pairs half of that apart; back with a sign of -1.
REALHF_ONCE void rotate(const Rotation& rotation, int64_t position, float sign, float* head) {
  const int64_t half = rotation.turning / 2;
  const float* cosines = rotation.angles + position * rotation.turning;
  const float* sines = cosines + rotation.count * rotation.turning;
  int64_t i = 0;
  for (; i + REALHF_WIDTH <= half; i += REALHF_WIDTH) {
    const Wide first = load_wide(head + i), second = load_wide(head + half + i);
    const Wide low = first * load_wide(cosines + i) + second * load_wide(sines + i) * sign;
    const Wide high = second * load_wide(cosines + half + i) + first * load_wide(sines + half + i) * sign;
    __builtin_memcpy(head + i, &low, sizeof low);
    __builtin_memcpy(head + half + i, &high, sizeof high);
  }
  for (; i < half; ++i) {
    const float first = head[i], second = head[half + i];
    head[i] = first * cosines[i] + second * sines[i] * sign;
    head[half + i] = second * cosines[half + i] + first * sines[half + i] * sign;
  }
}
