// A matrix packed in tiles of kPadding outputs, as the product with few rows reads it.
#pragma once

#include <cstdint>

namespace realhf {

template <typename scalar_t>
struct Matrix {  // weight[outs, depth] as tiles[outs / kPadding, depth, kPadding]
  const scalar_t *tiles, *bias;
  int64_t outs, depth;
};

}  // namespace realhf
