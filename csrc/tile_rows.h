// Products of rows with a tiled matrix (tiles.h); compiled for every instruction set by multi_isa.h.

constexpr int64_t kDeep = 256;  // depth of a tile that fits the L1 cache
constexpr int kParts = kPadding / REALHF_WIDTH;  // registers per row of a tile

// The weights of kPadding outputs as float32 vectors.
template <typename weight_t>
struct Tile {
  static constexpr int kStep = 1;
  const weight_t* values;

  explicit REALHF_INLINE_MEMBER Tile(const char* from) : values(reinterpret_cast<const weight_t*>(from)) {}
  REALHF_INLINE_MEMBER Vec at(int64_t k, int, int part) const {
    return load_vec(values + k * kPadding + part * REALHF_WIDTH);
  }
};

// Two adjacent numbers of an output are a word, the first in its lower half.
template <>
struct Tile<BFloat16> {
  static constexpr int kStep = 2;
  const char* words;

  explicit REALHF_INLINE_MEMBER Tile(const char* from) : words(from) {}
  REALHF_INLINE_MEMBER VecWords pairs(int64_t k, int part) const {  // of depths k and k + 1; k is even
    VecWords both;
    __builtin_memcpy(&both, words + k * kPadding * 2 + part * sizeof both, sizeof both);
    return both;
  }
  REALHF_INLINE_MEMBER Vec at(int64_t k, int second, int part) const {
    return (Vec)(second ? pairs(k, part) & 0xffff0000u : pairs(k, part) << 16);
  }
};

// Four adjacent integers of an output are a word: shifts convert them faster than what the compiler makes of bytes.
template <>
struct Tile<int8_t> {
  static constexpr int kStep = 4;
  const char *scales, *words;

  explicit REALHF_INLINE_MEMBER Tile(const char* from) : scales(from), words(from + kPadding * 4) {}
  REALHF_INLINE_MEMBER Vec at(int64_t k, int byte, int part) const {  // of depth k + byte; k is a multiple of kStep
    VecWords four;
    Vec scale;
    __builtin_memcpy(&four, words + k * kPadding + part * sizeof four, sizeof four);
    __builtin_memcpy(&scale, scales + part * sizeof scale, sizeof scale);
    return __builtin_convertvector((VecInts)(four << (24 - 8 * byte)) >> 24, Vec) * scale;
  }
};

// The weights of depths k..k+count, [count, kPadding], in `buffer` unless they are float32.
template <typename weight_t>
REALHF_INLINE const float* converted(const Tile<weight_t>& tile, int64_t k, int64_t count, float* buffer) {
  constexpr int kStep = Tile<weight_t>::kStep;
  for (int64_t i = 0; i < count; i += kStep) {
    for (int step = 0; step < kStep; ++step) {
      for (int part = 0; part < kParts; ++part) {
        const Vec lanes = tile.at(k + i, step, part);
        __builtin_memcpy(buffer + (i + step) * kPadding + part * REALHF_WIDTH, &lanes, sizeof lanes);
      }
    }
  }
  return buffer;
}

REALHF_INLINE const float* converted(const Tile<float>& tile, int64_t k, int64_t, float*) {
  return tile.values + k * kPadding;
}

// One or two rows and enough tiles to fill the registers; independent sums hide the latency.
template <int kRows, int kTiles, typename weight_t, typename scalar_t>
REALHF_INLINE void tiled_microkernel(const Matrix<scalar_t>& matrix, int64_t out, const float* x, float* y,
                                     int64_t y_row, bool add) {
  const int64_t depth = matrix.depth;
  Vec sums[kRows][kTiles * kParts];
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kTiles * kParts; ++n) {
      sums[m][n] = add ? load_vec(y + m * y_row + n * REALHF_WIDTH) : Vec{};
    }
  }
  const char* const first = matrix.tile(out);
  const int64_t tile_bytes = matrix.tile_bytes();
  constexpr int kStep = Tile<weight_t>::kStep;
  for (int64_t k = 0; k < depth; k += kStep) {
    for (int step = 0; step < kStep; ++step) {
      for (int n = 0; n < kTiles * kParts; ++n) {
        const Vec right = Tile<weight_t>(first + n / kParts * tile_bytes).at(k, step, n % kParts);
        for (int m = 0; m < kRows; ++m) sums[m][n] += right * x[m * depth + k + step];
      }
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kTiles * kParts; ++n) {
      __builtin_memcpy(y + m * y_row + n * REALHF_WIDTH, &sums[m][n], sizeof(Vec));
    }
  }
}

template <int kRows, typename weight_t, typename scalar_t>
REALHF_NOINLINE void gemm_few_rows(const Matrix<scalar_t>& matrix, const float* x, bool add, float* y, int64_t y_row) {
  constexpr int kTiles = REALHF_WIDTH / 2 / kRows;
  int64_t out = 0;
  for (; out + kTiles * kPadding <= matrix.outs; out += kTiles * kPadding) {
    tiled_microkernel<kRows, kTiles, weight_t>(matrix, out, x, y + out, y_row, add);
  }
  for (; out < matrix.outs; out += kPadding) tiled_microkernel<kRows, 1, weight_t>(matrix, out, x, y + out, y_row, add);
}

// Blocks over depth keep a tile in the L1 cache for all rows; rows are divided evenly into register blocks.
template <typename weight_t, typename scalar_t>
REALHF_NOINLINE void gemm_many_rows(const Matrix<scalar_t>& matrix, int64_t rows, const float* x, bool add, float* y,
                                    int64_t y_row) {
  alignas(64) float buffer[kDeep * kPadding];
  const int64_t depth = matrix.depth, n_blocks = (rows + kMaxRows - 1) / kMaxRows;
  for (int64_t out = 0; out < matrix.outs; out += kPadding) {
    const Tile<weight_t> tile(matrix.tile(out));
    for (int64_t k = 0; k < depth; k += kDeep) {
      const int64_t some = min_of(kDeep, depth - k);
      const float* const weights = converted(tile, k, some, buffer);  // once for all rows
      for (int64_t block = 0, r = 0; block < n_blocks; ++block) {
        const int64_t stop = (block + 1) * rows / n_blocks;
        gemm(stop - r, kPadding, some, x + r * depth + k, depth, 1, weights, kPadding, y + r * y_row + out, y_row,
             add || k > 0);
        r = stop;
      }
    }
  }
}

template <typename weight_t, typename scalar_t>
REALHF_INLINE void product(const Matrix<scalar_t>& matrix, int64_t rows, const float* x, bool add, float* y,
                           int64_t y_row) {
  switch (rows) {
    case 1:
      return gemm_few_rows<1, weight_t>(matrix, x, add, y, y_row);
    case 2:
      return gemm_few_rows<2, weight_t>(matrix, x, add, y, y_row);
    default:
      return gemm_many_rows<weight_t>(matrix, rows, x, add, y, y_row);
  }
}

#ifdef REALHF_DOT_PAIRS
#include "dot_rows.h"
#endif

// y[rows, outs] (+)= x[rows, depth] . weight^T + bias; a row's result does not depend on the other rows.
template <typename scalar_t>
REALHF_INLINE void linear(const Matrix<scalar_t>& matrix, int64_t rows, const float* x, bool add, float* y,
                          int64_t y_row) {
  for (int64_t r = 0; matrix.bias && r < rows; ++r) {
    float* const row = y + r * y_row;
    for (int64_t c = 0; c < matrix.outs; c += kLanes) {
      const Floats bias = load(matrix.bias + c);
      store(row + c, add ? load(row + c) + bias : bias);
    }
  }
  const bool adds = add || matrix.bias;
  switch (matrix.type) {
    case TileType::float32:
      return product<float>(matrix, rows, x, adds, y, y_row);
    case TileType::bfloat16:
#ifdef REALHF_DOT_PAIRS
      if (sizeof(scalar_t) == sizeof(BFloat16)) return dot_product(matrix, rows, x, adds, y, y_row);
#endif
      return product<BFloat16>(matrix, rows, x, adds, y, y_row);
    case TileType::int8:
      return product<int8_t>(matrix, rows, x, adds, y, y_row);
  }
}

template <typename scalar_t>
REALHF_NOINLINE void tiled_gemm(const Matrix<scalar_t>& matrix, int64_t rows, const float* x, float* y, int64_t y_row) {
  linear(matrix, rows, x, false, y, y_row);
}
