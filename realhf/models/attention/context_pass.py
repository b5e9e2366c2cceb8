"""Attention of context parallelism: queries of this worker's tokens, keys and values of all tokens.

Keys and values are gathered in every layer (Llama 3, arXiv 2407.21783, section 3.3.2), and their gradients are
reduce-scattered.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from realhf.comm.context_parallel import ContextRegion
from realhf.comm.tensor_parallel import TensorParallelRegion
from realhf.models.attention.context_attention import RowPart, attend_to_rows
from realhf.models.attention.pass_attention import StageAttention
from realhf.models.attention.stage_rotary import Rotation
from realhf.models.low_rank import Dropout
from realhf.ops.rows import RowLayout


@dataclass(frozen=True)
class ContextPass:
    """Attention within packed rows, of the tokens that this member of ``region`` has; ``rotation`` is of these."""

    stage: StageAttention
    layout: RowLayout
    rotation: Rotation
    region: ContextRegion
    dropout: Dropout | None

    @cached_property
    def parts(self) -> tuple[RowPart, ...]:
        """The parts of rows that this member has, in order."""
        starts, parts, n_before = [*accumulate(self.layout.lengths, initial=0)], list[RowPart](), 0
        for run in self.region.runs:
            for row, next_row in pairwise(starts):
                first, last = max(row, run.start), min(next_row, run.stop)
                if first < last:
                    offset = n_before - run.start
                    parts.append(RowPart(first + offset, last + offset, row, first - row))
            n_before += len(run)
        return tuple(parts)

    def __call__(self, block: int, qkv: Tensor) -> Tensor:
        return self._attend(block, *self.stage.rotated(block, qkv, self.rotation))

    def _attend(self, block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = self.region.copy_to_tp(torch.stack((k, v), 1)).unbind(1)
        return attend_to_rows(q, k, v, self.parts, self.stage.rules[block], self.stage.sinks(block))

    def of_delta(self, block: int, projected: Tensor, region: TensorParallelRegion) -> Tensor:
        raise NotImplementedError("the state of a row is not divided; ``strategy_problems`` refuses it")

    def of_latents(self, block: int, q: Tensor, latents: Tensor) -> Tensor:
        config = self.stage.config
        qkv = self.stage.latent(block).expand(q, latents, config, self.dropout)
        return self._attend(block, *self.stage.rotated(block, qkv, self.rotation))[..., : config.value_dim]
