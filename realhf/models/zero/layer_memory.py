"""Gives the layers of a stage memory when a pass reaches them: weights of ZeRO-3, gradients of ZeRO-2 and ZeRO-3.

All data-parallel ranks make the same passes, since every pass has collectives.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from realhf.models.zero.gathering import WeightGathering
from realhf.models.zero.gradients import LayerGradients

EMBEDDING = 0


class LayerMemory:
    """Layers are numbered as in ``ParamSpec.layer``. ``blocks`` are those of the stage's blocks, in ascending order.

    ``trained`` layers have gradients. ``head`` are the layers of the final norm and the unembedding, which the last
    stage uses after its blocks. The weights of a layer are gathered while the one before it computes. Backward passes
    gather them again.
    """

    def __init__(
        self, blocks: Sequence[int], head: Sequence[int], weights: WeightGathering | None,
        gradients: LayerGradients | None, trained: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.blocks, self.head = blocks, tuple(head)
        self.weights, self.gradients = weights, gradients
        self._trained, self._with_gradients = trained, set[int]()

    @contextmanager
    def forward(self, layer: int) -> Iterator[None]:
        """Have the weights of the embedding or of a block."""
        if self.weights is None:
            yield
            return
        self.weights.wait(layer)
        if layer == self.blocks[-1]:
            for after in self.head:
                self.weights.start(after)
        else:
            self.weights.start(layer + 1)  # if this stage has it
        yield
        self.weights.free(layer)

    def enter_head(self) -> None:
        """Have the weights of the head, until the backward pass has used them or ``release``."""
        for layer in self.head:
            if self.weights is not None:
                self.weights.wait(layer)
            if torch.is_grad_enabled():
                self._allocate(layer)
        if torch.is_grad_enabled() and self.head and self.weights is not None:
            self.weights.start(self.blocks[-1])

    def release(self) -> None:
        """Free the weights of the head after a pass without gradients."""
        if self.weights is not None:
            for layer in self.head:
                self.weights.free(layer)

    def backward_reached(self, block: int, _grad: Tensor | None = None) -> None:
        """Note that the gradient of the input of a block (of the head: the number after the last one) is known.

        It completes the gradients of that block, and the backward pass of the layer before it begins.
        """
        layer = block + 1
        self._complete(self.head if layer > self.blocks[-1] else (layer,))
        if layer - 1 in self.blocks:
            self._allocate(layer - 1)
            if self.weights is not None:
                self.weights.wait(layer - 1)
                if layer - 2 in self.blocks:
                    self.weights.start(layer - 2)
        else:
            self._allocate(EMBEDDING)

    def backward_ended(self) -> None:
        """Reduce what is complete after a backward pass."""
        self._complete(sorted(self._with_gradients, reverse=True))

    def finish(self) -> None:
        """Wait until the gradients are reduced."""
        if self.gradients is not None:
            self.gradients.finish()

    def _allocate(self, layer: int) -> None:
        if self.gradients is not None and layer in self._trained and layer not in self._with_gradients:
            self.gradients.allocate(layer)
            self._with_gradients.add(layer)

    def _complete(self, layers: Sequence[int]) -> None:
        for layer in layers:
            if self.weights is not None:
                self.weights.free(layer)
            if self.gradients is not None and layer in self._with_gradients:
                self.gradients.reduce(layer)
                self._with_gradients.discard(layer)
