// Products with tiles of bfloat16 by the best instruction set of this machine, against sums in float64. Prints "dot" if it
// has instructions on pairs, else "no dot"; fails if a product is wrong or depends on the number of rows.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "arena.h"
#include "bf16_dot.h"
#include "rope.h"
#include "tiles.h"

namespace realhf {
namespace {

#define REALHF_KERNEL_FILE "tile_products.h"
#include "multi_isa.h"

BFloat16 rounded(float value) {
  Floats lanes = Floats{} + value;
  BFloat16 all[kLanes];
  store(all, lanes);
  return all[0];
}

using Product = void (*)(const Matrix<BFloat16>&, int64_t, const float*, float*, int64_t);

// Returns the number of wrong results.
int64_t check(Product product, bool rounds_rows, int64_t rows, int64_t outs, int64_t depth, std::mt19937& chance) {
  std::normal_distribution<float> normal;
  std::vector<float> x(rows * depth), y(rows * outs), one(outs);
  std::vector<BFloat16> tiles(outs * depth);
  for (float& value : x) value = normal(chance);
  for (BFloat16& value : tiles) value = rounded(normal(chance));
  const auto weight = [&](int64_t out, int64_t k) {
    return as_float(tiles[out / kPadding * depth * kPadding + k / 2 * kPadding * 2 + out % kPadding * 2 + k % 2]);
  };
  const Matrix<BFloat16> matrix{reinterpret_cast<const char*>(tiles.data()), TileType::bfloat16, nullptr, outs, depth};
  product(matrix, rows, x.data(), y.data(), outs);
  int64_t n_wrong = 0;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t out = 0; out < outs; ++out) {
      double sum = 0.0, size = 0.0;
      for (int64_t k = 0; k < depth; ++k) {
        const float value = x[r * depth + k];
        const double term = static_cast<double>(rounds_rows ? as_float(rounded(value)) : value) * weight(out, k);
        sum += term, size += std::abs(term);
      }
      n_wrong += !(std::abs(y[r * outs + out] - sum) <= 1e-6 * size);
    }
    product(matrix, 1, x.data() + r * depth, one.data(), outs);
    n_wrong += std::memcmp(one.data(), y.data() + r * outs, outs * sizeof(float)) != 0;
  }
  if (n_wrong > 0) {
    std::fprintf(stderr, "%lld wrong: rows %lld, outs %lld, depth %lld\n", static_cast<long long>(n_wrong),
                 static_cast<long long>(rows), static_cast<long long>(outs), static_cast<long long>(depth));
  }
  return n_wrong;
}

int run() {
  const bool dot = best_isa<bool (*)()>(REALHF_ALL_ISAS(has_dot))();
  const auto product = best_isa<Product>(REALHF_ALL_ISAS(tiled_gemm<BFloat16>));
  std::mt19937 chance(1);
  int64_t n_wrong = 0;
  for (int64_t depth : {16, 48, 272, 2064}) {
    for (int64_t outs : {16, 48, 144}) {
      for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 63, 64, 65, 130}) {
        if (rows * outs * depth < 4'000'000) n_wrong += check(product, dot, rows, outs, depth, chance);
      }
    }
  }
  n_wrong += check(product, dot, 3, 16, 4112, chance) + check(product, dot, 1, 16, 16400, chance);
  std::puts(dot ? "dot" : "no dot");
  return n_wrong > 0;
}

}  // namespace
}  // namespace realhf

int main() { return realhf::run(); }
