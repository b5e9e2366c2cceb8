"""What a forward pass over one micro-batch offers to an interface."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.data.batch import SequenceBatch
from realhf.models.transformer import Transformer


@dataclass(frozen=True)
class ForwardOutputs:
    """Hidden states ``[T, D]`` of a micro-batch; heads are applied when asked for."""

    model: Transformer
    hidden: Tensor
    batch: SequenceBatch

    def logprobs(self, temperature: float = 1.0) -> Tensor:
        return self.model.logprobs(self.hidden, self.batch["tokens"], self.batch.lengths("tokens"), temperature)

    def values(self) -> Tensor:
        return self.model.values(self.hidden, self.batch["tokens"].numel())

    def last_values(self) -> Tensor:
        last = torch.tensor(self.batch.columns["tokens"].offsets[1:], device=self.hidden.device) - 1
        return self.values().index_select(0, last)
