"""Matrices in the order in which the CPU kernels of decoding read them, and their product with a few rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.api.config.choices import WeightType
from realhf.arch.decode_kernel import WIDTH
from realhf.ops import extension

TILE_N = WIDTH
"""Output rows per tile of a weight, ``[in, TILE_N]``."""
SMALLEST = 1.1754943508222875e-38
"""The smallest normal float32: scales of integers are at least this in divisions."""


def pack_tiles(weight: Tensor, dtype: WeightType = WeightType.auto) -> Tensor:
    """Copy a matrix ``[out, in]`` to ``[ceil(out / TILE_N), in, TILE_N]``, padded with zeros.

    A tile of bfloat16 numbers has the order ``[in / 2, TILE_N, 2]``; ``in`` is then even. Integers are
    ``[ceil(out / TILE_N), (4 + in) * TILE_N]`` bytes: the float32 scales of a tile's outputs, then
    ``[in / 4, TILE_N, 4]`` numbers, rounded to nearest. The largest of an output is 127 or -127.
    """
    padded = F.pad(weight, (0, 0, 0, -len(weight) % TILE_N))
    tiles = padded.view(-1, TILE_N, weight.shape[1]).transpose(1, 2)
    if dtype is WeightType.int8:
        values = tiles.float()
        scales = values.abs().amax(1) / 127
        numbers = (values / scales.clamp(min=SMALLEST)[:, None]).round_().to(torch.int8)
        words = numbers.unflatten(1, (-1, 4)).transpose(2, 3)
        return torch.cat((scales.view(torch.int8), words.flatten(1)), 1)
    if dtype is WeightType.bfloat16 or tiles.dtype == torch.bfloat16:
        pairs = tiles.bfloat16().unflatten(1, (-1, 2)).transpose(2, 3)
        return pairs.reshape(tiles.shape)
    return tiles.contiguous()


def tiled_linear(x: Tensor, tiles: Tensor, n_outs: int) -> Tensor:
    """Return ``x`` ``[S, in]`` times the transpose of a tiled matrix, ``[S, n_outs]`` float32."""
    return extension.required("tiled_linear", x.device.type)(x, tiles, n_outs)
