// Products of rows, rounded to bfloat16, with tiles of bfloat16 by instructions on pairs (bf16_dot.h); included by
// tile_rows.h.

constexpr int64_t kBlockRows = 64, kBlockDepth = 256;  // rows and depth of a block: its tiles fit the L1 cache, its rows L2
constexpr int64_t kBlockWords = kBlockRows * kBlockDepth / 2;

// Products of kRows rows, [kRows, n_words] of pairs, with kTiles tiles.
template <int kRows, int kTiles>
REALHF_INLINE void dot_microkernel(const char* tiles, int64_t tile_bytes, int64_t n_words, const uint32_t* x, float* y,
                                   int64_t y_row, bool add) {
  constexpr int kAcross = kTiles * kParts;
  Vec sums[kRows][kAcross];
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kAcross; ++n) sums[m][n] = add ? load_vec(y + m * y_row + n * REALHF_WIDTH) : Vec{};
  }
  for (int64_t word = 0; word < n_words; ++word) {
    for (int n = 0; n < kAcross; ++n) {
      const VecWords pairs = Tile<BFloat16>(tiles + n / kParts * tile_bytes).pairs(2 * word, n % kParts);
      for (int m = 0; m < kRows; ++m) sums[m][n] = REALHF_DOT_PAIRS(sums[m][n], pairs, x[m * n_words + word]);
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kAcross; ++n) __builtin_memcpy(y + m * y_row + n * REALHF_WIDTH, &sums[m][n], sizeof(Vec));
  }
}

// As many tiles as give about 16 independent sums, which hide the latency.
template <int kRows>
REALHF_INLINE void dot_tiles(const char* tiles, int64_t tile_bytes, int64_t outs, int64_t n_words, const uint32_t* x,
                             float* y, int64_t y_row, bool add) {
  constexpr int kMost = 16 / (kRows * kParts), kTiles = kMost < 1 ? 1 : kMost > 8 ? 8 : kMost;
  int64_t out = 0;
  for (; out + kTiles * kPadding <= outs; out += kTiles * kPadding) {
    dot_microkernel<kRows, kTiles>(tiles + out / kPadding * tile_bytes, tile_bytes, n_words, x, y + out, y_row, add);
  }
  for (; out < outs; out += kPadding) {
    dot_microkernel<kRows, 1>(tiles + out / kPadding * tile_bytes, tile_bytes, n_words, x, y + out, y_row, add);
  }
}

REALHF_NOINLINE void dot_few_rows(int64_t rows, const char* tiles, int64_t tile_bytes, int64_t outs, int64_t n_words,
                                  const uint32_t* x, float* y, int64_t y_row, bool add) {
  switch (rows) {
    case 1:
      return dot_tiles<1>(tiles, tile_bytes, outs, n_words, x, y, y_row, add);
    case 2:
      return dot_tiles<2>(tiles, tile_bytes, outs, n_words, x, y, y_row, add);
    case 3:
      return dot_tiles<3>(tiles, tile_bytes, outs, n_words, x, y, y_row, add);
    case 4:
      return dot_tiles<4>(tiles, tile_bytes, outs, n_words, x, y, y_row, add);
    case 5:
      return dot_tiles<5>(tiles, tile_bytes, outs, n_words, x, y, y_row, add);
    case 6:
      return dot_tiles<6>(tiles, tile_bytes, outs, n_words, x, y, y_row, add);
#if REALHF_MAX_ROWS > 6
    case 7:
      return dot_tiles<7>(tiles, tile_bytes, outs, n_words, x, y, y_row, add);
    case 8:
      return dot_tiles<8>(tiles, tile_bytes, outs, n_words, x, y, y_row, add);
#endif
  }
}

// y[rows, outs] (+)= x[rows, depth] . weight^T. A sum has the same order for any number of rows.
template <typename scalar_t>
REALHF_NOINLINE void dot_product(const Matrix<scalar_t>& matrix, int64_t rows, const float* x, bool add, float* y,
                                 int64_t y_row) {
  alignas(64) uint32_t pairs[kBlockWords];
  const int64_t tile_bytes = matrix.tile_bytes();
  const bool is_few = rows <= kMaxRows;  // no other rows would find the tiles in the cache
  const int64_t deep = is_few ? kBlockWords * 2 / kMaxRows / kPadding * kPadding : kBlockDepth;
  const int64_t across = is_few ? matrix.outs : 2 * kPadding;
  for (int64_t first = 0; first < rows; first += kBlockRows) {
    const int64_t count = min_of(kBlockRows, rows - first), n_blocks = (count + kMaxRows - 1) / kMaxRows;
    for (int64_t k = 0; k < matrix.depth; k += deep) {
      const int64_t some = min_of(deep, matrix.depth - k);
      for (int64_t r = 0; r < count; ++r) {
        auto* const row = reinterpret_cast<BFloat16*>(pairs + r * some / 2);
        for (int64_t c = 0; c < some; c += kLanes) store(row + c, load(x + (first + r) * matrix.depth + k + c));
      }
      for (int64_t out = 0; out < matrix.outs; out += across) {
        const char* const tiles = matrix.tile(out) + k * kPadding * 2;
        const int64_t outs = min_of(across, matrix.outs - out);
        for (int64_t block = 0, r = 0; block < n_blocks; ++block) {
          const int64_t stop = (block + 1) * count / n_blocks;
          dot_few_rows(stop - r, tiles, tile_bytes, outs, some / 2, pairs + r * some / 2, y + (first + r) * y_row + out, y_row,
                       add || k > 0);
          r = stop;
        }
      }
    }
  }
}
