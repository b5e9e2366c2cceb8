"""The outputs of a forward pass over one micro-batch, for interfaces."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.data.batch import SequenceBatch
from realhf.models.engine.packing import Packing
from realhf.models.transformer import Transformer


@dataclass(frozen=True)
class ForwardOutputs:
    """Hidden states of the packed tokens of a micro-batch, ``[t, D]``; heads are computed on demand."""

    model: Transformer
    hidden: Tensor
    batch: SequenceBatch
    packing: Packing

    def logprobs(self, temperature: float = 1.0) -> Tensor:
        p = self.packing
        return p.unpack(self.model.logprobs(self.hidden, p.tokens, p.lengths, temperature, p.prev_index))

    def values(self) -> Tensor:
        return self.packing.unpack(self.model.values(self.hidden, len(self.packing.tokens)))

    def last_values(self) -> Tensor:
        last = torch.tensor(self.batch.columns["tokens"].offsets[1:], device=self.hidden.device) - 1
        return self.values().index_select(0, last)
