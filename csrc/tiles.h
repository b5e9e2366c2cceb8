// A matrix as a product of few rows reads it: kPadding outputs beside one another, panel after panel.
#pragma once

#include <cstdint>

namespace realhf {

template <typename scalar_t>
struct Matrix {  // weight[outs, depth] as panels[outs / kPadding, depth, kPadding]
  const scalar_t *tiles, *bias;
  int64_t outs, depth;
};

}  // namespace realhf
