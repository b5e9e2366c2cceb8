"""Time and memory of layers whose weights or gradients exist for a part of a pass (ZeRO-2 and ZeRO-3)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from realhf.api.layout import ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.api.param_box import box_numel, shard_box
from realhf.arch.lora import own_specs
from realhf.arch.param_specs import stage_layers


@dataclass(frozen=True)
class PerLayer:
    """A quantity of the embedding, of the largest block, and of the final norm and the unembedding of a stage."""

    embedding: float
    block: float
    head: float

    @property
    def largest(self) -> float:
        return max(self.embedding, self.block, self.head)

    def map(self, function: Callable[[float], float]) -> "PerLayer":
        return PerLayer(function(self.embedding), function(self.block), function(self.head))


NO_LAYERS = PerLayer(0.0, 0.0, 0.0)


def layer_numels(config: ModelConfig, strategy: ParallelStrategy) -> tuple[PerLayer, ...]:
    """Return the parameters that a role owns by layer, per stage, on the first tensor-parallel rank."""
    return _layer_numels(config, strategy.weight_tp, strategy.pp, strategy.vpp)


@lru_cache(maxsize=1024)
def _layer_numels(config: ModelConfig, tp: int, pp: int, vpp: int) -> tuple[PerLayer, ...]:
    last, stages = config.n_layers + 1, stage_layers(config, pp, vpp)
    numels = dict.fromkeys(range(last + 1), 0)
    for spec in own_specs(config):
        numels[spec.layer] += box_numel(shard_box(spec, tp, 0))
        if spec.shared_layer is not None:  # a tied embedding is also gathered as the head
            numels[spec.shared_layer] += box_numel(shard_box(spec, tp, 0))
    return tuple(
        PerLayer(numels[0] * (0 in layers), max(numels[layer] for layer in layers if 0 < layer < last),
                 numels[last] * (last in layers))
        for layers in stages
    )  # fmt: skip


@dataclass(frozen=True)
class LayerCollectives:
    """Seconds of the collectives of a stage's layers: to gather weights (ZeRO-3), and to reduce gradients."""

    gather: PerLayer
    reduce: PerLayer

    def overlapped(self, forward: float, backward: float, n_blocks: int) -> tuple[float, float]:
        """Return the seconds of a forward and a backward pass whose computation takes the given seconds.

        The backward pass of inference takes none.
        """
        return self._forward(forward / n_blocks, n_blocks), self._backward(backward / n_blocks, n_blocks)

    def _forward(self, block: float, n_blocks: int) -> float:
        """The embedding and the first block are waited for; the next layer is gathered while a block computes."""
        gather = self.gather
        blocks = (n_blocks - 1) * max(block, gather.block) + max(block, gather.head)
        return gather.embedding + gather.block + blocks

    def _backward(self, block: float, n_blocks: int) -> float:
        """While a block computes, the one before it is gathered, and gradients of the one after it are reduced.

        The reductions of the first block and the embedding are waited for.
        """
        if not block:
            return 0.0
        gather, reduce = self.gather, self.reduce
        blocks = max(block, gather.block + reduce.head) + (n_blocks - 1) * max(block, gather.block + reduce.block)
        return blocks + reduce.block + reduce.embedding

    def total(self, n_blocks: int, trains: bool) -> float:
        """Return the seconds of all collectives of a forward pass and, in training, of its backward pass."""
        gathered, reduced = (
            layers.embedding + n_blocks * layers.block + layers.head for layers in (self.gather, self.reduce)
        )
        return gathered + (n_blocks * self.gather.block + reduced if trains else 0.0)
