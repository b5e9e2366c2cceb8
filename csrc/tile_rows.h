// Products of rows with a tiled matrix (tiles.h); compiled for every instruction set by multi_isa.h.

constexpr int64_t kDeep = 256;  // depth of a tile that fits the L1 cache

// One or two rows and enough tiles to fill the registers; independent sums hide the latency.
template <int kRows, int kTiles, typename scalar_t>
REALHF_INLINE void tiled_microkernel(int64_t depth, const float* x, const scalar_t* tiles, float* y, int64_t y_row,
                                     bool add) {
  constexpr int kParts = kPadding / REALHF_WIDTH;
  Vec sums[kRows][kTiles * kParts];
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kTiles * kParts; ++n) {
      sums[m][n] = add ? load_vec(y + m * y_row + n * REALHF_WIDTH) : Vec{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    for (int n = 0; n < kTiles * kParts; ++n) {
      const scalar_t* const tile = tiles + (n / kParts) * depth * kPadding + n % kParts * REALHF_WIDTH;
      const Vec right = load_vec(tile + k * kPadding);
      for (int m = 0; m < kRows; ++m) sums[m][n] += right * x[m * depth + k];
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kTiles * kParts; ++n) {
      __builtin_memcpy(y + m * y_row + n * REALHF_WIDTH, &sums[m][n], sizeof(Vec));
    }
  }
}

template <int kRows, typename scalar_t>
REALHF_NOINLINE void gemm_few_rows(const Matrix<scalar_t>& matrix, const float* x, bool add, float* y, int64_t y_row) {
  constexpr int kTiles = REALHF_WIDTH / 2 / kRows;
  int64_t out = 0;
  for (; out + kTiles * kPadding <= matrix.outs; out += kTiles * kPadding) {
    tiled_microkernel<kRows, kTiles>(matrix.depth, x, matrix.tiles + out * matrix.depth, y + out, y_row, add);
  }
  for (; out < matrix.outs; out += kPadding) {
    tiled_microkernel<kRows, 1>(matrix.depth, x, matrix.tiles + out * matrix.depth, y + out, y_row, add);
  }
}

// Blocks over depth keep a tile in the L1 cache for all rows; rows are divided evenly into register blocks.
template <typename scalar_t>
REALHF_NOINLINE void gemm_many_rows(const Matrix<scalar_t>& matrix, int64_t rows, const float* x, bool add, float* y,
                                    int64_t y_row) {
  const int64_t depth = matrix.depth, n_blocks = (rows + kMaxRows - 1) / kMaxRows;
  for (int64_t out = 0; out < matrix.outs; out += kPadding) {
    const scalar_t* const tile = matrix.tiles + out * depth;
    for (int64_t k = 0; k < depth; k += kDeep) {
      const int64_t some = min_of(kDeep, depth - k);
      for (int64_t block = 0, r = 0; block < n_blocks; ++block) {
        const int64_t stop = (block + 1) * rows / n_blocks;
        gemm(stop - r, kPadding, some, x + r * depth + k, depth, 1, tile + k * kPadding, kPadding, y + r * y_row + out,
             y_row, add || k > 0);
        r = stop;
      }
    }
  }
}

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
  switch (rows) {
    case 1:
      return gemm_few_rows<1>(matrix, x, adds, y, y_row);
    case 2:
      return gemm_few_rows<2>(matrix, x, adds, y, y_row);
    default:
      return gemm_many_rows(matrix, rows, x, adds, y, y_row);
  }
}

REALHF_NOINLINE void tiled_gemm(const Matrix<float>& matrix, int64_t rows, const float* x, float* y, int64_t y_row) {
  linear(matrix, rows, x, false, y, y_row);
}

REALHF_NOINLINE void tiled_gemm(const Matrix<BFloat16>& matrix, int64_t rows, const float* x, float* y, int64_t y_row) {
  linear(matrix, rows, x, false, y, y_row);
}
