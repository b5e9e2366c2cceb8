// Some rows times a matrix that lies in panels, for every width of registers: see panels.h.

constexpr int64_t kDeep = 256;  // as much of a panel stays in the first cache

// One or two rows and as many panels as fill the registers: of a single panel, every sum would wait for the one before.
template <int kRows, int kPanels, typename scalar_t>
REALHF_INLINE void panels_tile(int64_t depth, const float* x, const scalar_t* panels, float* y, int64_t y_row,
                               bool add) {
  constexpr int kParts = kPadding / REALHF_WIDTH;
  Wide sums[kRows][kPanels * kParts];
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kPanels * kParts; ++n) {
      sums[m][n] = add ? load_wide(y + m * y_row + n * REALHF_WIDTH) : Wide{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    for (int n = 0; n < kPanels * kParts; ++n) {
      const scalar_t* const panel = panels + (n / kParts) * depth * kPadding + n % kParts * REALHF_WIDTH;
      const Wide right = load_wide(panel + k * kPadding);
      for (int m = 0; m < kRows; ++m) sums[m][n] += right * x[m * depth + k];
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kPanels * kParts; ++n) {
      __builtin_memcpy(y + m * y_row + n * REALHF_WIDTH, &sums[m][n], sizeof(Wide));
    }
  }
}

template <int kRows, typename scalar_t>
REALHF_ONCE void product_of_few(const Matrix<scalar_t>& matrix, const float* x, bool add, float* y, int64_t y_row) {
  constexpr int kPanels = REALHF_WIDTH / 2 / kRows;
  int64_t out = 0;
  for (; out + kPanels * kPadding <= matrix.outs; out += kPanels * kPadding) {
    panels_tile<kRows, kPanels>(matrix.depth, x, matrix.panels + out * matrix.depth, y + out, y_row, add);
  }
  for (; out < matrix.outs; out += kPadding) {
    panels_tile<kRows, 1>(matrix.depth, x, matrix.panels + out * matrix.depth, y + out, y_row, add);
  }
}

// As many panels' depth as stays in the first cache meets all rows, which are dealt evenly over the tiles.
template <typename scalar_t>
REALHF_ONCE void product_of_many(const Matrix<scalar_t>& matrix, int64_t rows, const float* x, bool add, float* y,
                                 int64_t y_row) {
  const int64_t depth = matrix.depth, n_tiles = (rows + kTall - 1) / kTall;
  for (int64_t out = 0; out < matrix.outs; out += kPadding) {
    const scalar_t* const panel = matrix.panels + out * depth;
    for (int64_t k = 0; k < depth; k += kDeep) {
      const int64_t some = smaller(kDeep, depth - k);
      for (int64_t tile = 0, r = 0; tile < n_tiles; ++tile) {
        const int64_t stop = (tile + 1) * rows / n_tiles;
        product(stop - r, kPadding, some, x + r * depth + k, depth, 1, panel + k * kPadding, kPadding,
                y + r * y_row + out, y_row, add || k > 0);
        r = stop;
      }
    }
  }
}

// y[rows, outs] (+)= x[rows, depth] . weight^T + bias; a row's numbers are the same bits with any other rows.
template <typename scalar_t>
REALHF_INLINE void matrix_product(const Matrix<scalar_t>& matrix, int64_t rows, const float* x, bool add, float* y,
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
    case 1: return product_of_few<1>(matrix, x, adds, y, y_row);
    case 2: return product_of_few<2>(matrix, x, adds, y, y_row);
    default: return product_of_many(matrix, rows, x, adds, y, y_row);
  }
}

REALHF_ONCE void some_panels(const Matrix<float>& matrix, int64_t rows, const float* x, float* y, int64_t y_row) {
  matrix_product(matrix, rows, x, false, y, y_row);
}

REALHF_ONCE void some_panels(const Matrix<BFloat16>& matrix, int64_t rows, const float* x, float* y, int64_t y_row) {
  matrix_product(matrix, rows, x, false, y, y_row);
}
