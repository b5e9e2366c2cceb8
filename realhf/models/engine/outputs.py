"""What a forward pass over one micro-batch offers to an interface."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.data.batch import SequenceBatch
from realhf.models.engine.packing import Packing
from realhf.models.transformer import Transformer


@dataclass(frozen=True)
class ForwardOutputs:
    """Hidden states of a micro-batch's tokens as they were packed, ``[t, D]``; heads are applied when asked for."""

    model: Transformer
    hidden: Tensor
    batch: SequenceBatch
    packing: Packing

    def logprobs(self, temperature: float = 1.0) -> Tensor:
        packing = self.packing
        found = self.model.logprobs(self.hidden, packing.tokens, packing.lengths, temperature, packing.prev_index)
        return packing.unpack(found)

    def values(self) -> Tensor:
        return self.packing.unpack(self.model.values(self.hidden, len(self.packing.tokens)))

    def last_values(self) -> Tensor:
        last = torch.tensor(self.batch.columns["tokens"].offsets[1:], device=self.hidden.device) - 1
        return self.values().index_select(0, last)
