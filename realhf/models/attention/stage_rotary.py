"""Rotary embeddings of the blocks of a stage, which may differ in base, or have none."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from realhf.api.model_config import ModelConfig
from realhf.ops.norms import Rotary, rotate

Rows = Callable[[Tensor, torch.dtype], Tensor]
"""Returns the rows of a ``Rotary.table`` for the tokens of a pass, ``[2, T, 1, d]``, in a type."""


class Rotation:
    """Rotates the heads of a pass's tokens, which are at ``positions`` ``[T]``.

    ``tables`` has the ``Rotary.table`` of every block. ``growth`` are the factors of queries, ``[T, 1, 1]``, if they
    depend on the position.
    """

    def __init__(
        self, tables: Sequence[Tensor | None], positions: Tensor, growth: Tensor | None, rows: Rows | None = None
    ) -> None:
        self.tables, self.growth = tables, growth
        self._positions, self._rows = positions, rows or lru_cache(self._index)

    def _index(self, angles: Tensor, dtype: torch.dtype) -> Tensor:
        return angles[:, self._positions].to(dtype).unsqueeze(2)

    def __call__(self, block: int, x: Tensor) -> Tensor:
        """Return heads ``x`` ``[T, heads, d]`` after the rotation of a block."""
        angles = self.tables[block]
        return x if angles is None else rotate(x, angles, self._positions, partial(self._rows, angles, x.dtype))

    def grow(self, qkv: Tensor, n_q: int) -> Tensor:
        """Scale the queries of ``qkv`` ``[T, n_q + 2 * n_kv, d]`` by their positions."""
        if self.growth is None:
            return qkv
        q, kv = qkv.split((n_q, qkv.shape[1] - n_q), 1)
        return torch.cat((q * self.growth.to(q.dtype), kv), 1)


class StageRotary:
    """A table for each base and scaling; ``table_of`` has the number of every block's, -1 for a block without one."""

    def __init__(self, config: ModelConfig, layers: Sequence[int], device: torch.device) -> None:
        fixed, limit = config.with_fixed_rotary(), config.max_row_len if config.has_length_scaling else 0
        by_block = [fixed.rotary(layer) for layer in layers]
        distinct = list(dict.fromkeys(found for found in by_block if found is not None))
        dims = config.rotary_dims or config.head_dim
        self._rotaries = [Rotary(dims, base, dict(scaling), device, limit) for base, scaling in distinct]
        self.table_of = tuple(-1 if found is None else distinct.index(found) for found in by_block)
        self.query_growth = config.query_growth

    def tables(self, longest: int) -> list[Tensor]:
        """Return the distinct tables, with at least ``longest`` positions."""
        return [rotary.table(longest) for rotary in self._rotaries]

    def rotation(self, positions: Tensor, longest: int, rows: Rows | None = None) -> Rotation:
        """Return the rotation of tokens at ``positions`` below ``longest``; ``rows`` may have a longer life."""
        tables = self.tables(longest)
        by_block = [tables[number] if number >= 0 else None for number in self.table_of]
        return Rotation(by_block, positions, self._growth(positions, longest), rows)

    def _growth(self, positions: Tensor, longest: int) -> Tensor | None:
        """Return the scale of queries (Llama 4's attention temperature, of Ministral 3), None if all are 1."""
        scale, period = self.query_growth
        if not scale or longest <= period:
            return None
        return (1 + scale * torch.log(1 + torch.floor(positions / period)))[:, None, None]
