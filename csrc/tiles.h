// A matrix packed in tiles of kPadding outputs, as the product with few rows reads it.
#pragma once

#include <cstdint>

#include "simd.h"

namespace realhf {

enum class TileType : int64_t { float32, bfloat16, int8 };

// weight[outs, depth] as tiles: [depth, kPadding] float32 numbers, or [depth / 2, kPadding, 2] of bfloat16. A tile of
// integers is the float32 scales of its outputs, by which they are multiplied, and [depth / 4, kPadding, 4] numbers.
// scalar_t is the type of the model: where both are bfloat16, a product may round its other operand to bfloat16, too.
template <typename scalar_t>
struct Matrix {
  const char* tiles;
  TileType type;
  const scalar_t* bias;
  int64_t outs, depth;

  REALHF_INLINE_MEMBER int64_t tile_bytes() const {
    switch (type) {
      case TileType::float32:
        return depth * kPadding * 4;
      case TileType::bfloat16:
        return depth * kPadding * 2;
      default:
        return (depth + 4) * kPadding;
    }
  }

  REALHF_INLINE_MEMBER const char* tile(int64_t out) const { return tiles + out / kPadding * tile_bytes(); }

  REALHF_INLINE_MEMBER Matrix part(int64_t from, int64_t count) const {  // multiples of kPadding
    return {tile(from), type, bias ? bias + from : nullptr, count, depth};
  }
};

}  // namespace realhf
