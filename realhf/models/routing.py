"""Router replay: the experts of tokens are recorded in generation and used again in training (arXiv 2510.11370)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.api.model_config import ModelConfig
from realhf.base.partition import consecutive_runs
from realhf.ops.moe import expert_dtype

SlotMoves = Sequence[tuple[int, int, int, int]]


class ExpertCache:
    """The experts of cached tokens, ``[L, n_slots, max_len, k]``, of the routed layers of a stage."""

    def __init__(self, config: ModelConfig, n_layers: int, n_slots: int, max_len: int, device: torch.device) -> None:
        shape = n_layers, n_slots * max_len, config.experts_per_token
        self._data = torch.zeros(shape, dtype=expert_dtype(config.n_experts), device=device)
        self._max_len = max_len

    def indices(self, slots: Tensor, positions: Tensor) -> Tensor:
        return slots * self._max_len + positions

    def write(self, layer: int, indices: Tensor, experts: Tensor) -> None:
        """Store the experts ``[T, k]`` of tokens in one of the layers."""
        self._data[layer].index_copy_(0, indices, experts.to(self._data.dtype))

    def read(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return the experts of tokens in all layers, ``[T, L, k]``."""
        return self._data.index_select(1, self.indices(slots, positions)).transpose(0, 1)

    def copy(self, sources: Tensor, targets: Tensor, positions: Tensor) -> None:
        """Copy tokens between slots; no target is the source of another copy."""
        values = self._data.index_select(1, self.indices(sources, positions))
        self._data.index_copy_(1, self.indices(targets, positions), values)


@dataclass(frozen=True)
class Recording:
    """Writes the experts of a pass to a cache. ``routed`` are the indices of the stage's routed blocks, in order."""

    cache: ExpertCache
    indices: Tensor
    routed: tuple[int, ...]

    def replayed(self, index: int) -> None:
        return None

    def record(self, index: int, experts: Tensor) -> None:
        self.cache.write(self.routed.index(index), self.indices, experts)


@dataclass(frozen=True)
class Replay:
    """Makes a pass use ``experts``, ``[t, L, k]`` of all routed layers; ``numbers`` are those of a stage's blocks."""

    experts: Tensor
    numbers: Mapping[int, int]

    def replayed(self, index: int) -> Tensor:
        return self.experts[:, self.numbers[index]]

    def record(self, index: int, experts: Tensor) -> None:
        pass


class StageRouters:
    """The routed blocks of a stage with these ``layers``."""

    def __init__(self, config: ModelConfig, layers: Sequence[int]) -> None:
        self._config, self._layers = config, layers
        self._routed = tuple(index for index, layer in enumerate(layers) if layer in config.routed_layers)

    def __len__(self) -> int:
        return len(self._routed)

    def place(self, index: int) -> int:
        """Return the place of a block of the stage among its routed ones."""
        return self._routed.index(index)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The places of the stage's routed blocks among the routed layers of the model."""
        return tuple(self._config.routed_layers.index(self._layers[index]) for index in self._routed)

    def of_all_layers(self, sums: Tensor) -> Tensor:
        """Return what is known of the stage's routed blocks for all routed layers, zero elsewhere."""
        of_all = sums.new_zeros(len(self._config.routed_layers), sums.shape[1])
        for places in consecutive_runs(self.numbers):
            first = self.numbers[places.start]
            of_all[first : first + len(places)] = sums[places.start : places.stop]
        return of_all

    def new_cache(self, n_slots: int, max_len: int, device: torch.device) -> ExpertCache:
        return ExpertCache(self._config, len(self._routed), n_slots, max_len, device)

    def replay(self, experts: Tensor) -> Replay:
        """Return what makes a pass use ``experts`` ``[t, L * k]``, those of local tokens in all routed layers."""
        of_tokens = experts.unflatten(1, (len(self._config.routed_layers), -1))
        return Replay(of_tokens, dict(zip(self._routed, self.numbers, strict=True)))

    def recording(self, cache: ExpertCache | None, slots: Tensor, positions: Tensor) -> Recording | None:
        """Return what records the experts of tokens, None without a cache for them."""
        return None if cache is None else Recording(cache, cache.indices(slots, positions), self._routed)
