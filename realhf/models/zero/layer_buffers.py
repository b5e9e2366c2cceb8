"""Memory for the parameters of a shard, or for their gradients, that exists for a few layers at a time (ZeRO)."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from realhf.api.param_box import Box, ParamSpec
from realhf.models.flat_params import FlatParams


class LayerBuffers(Collection[int]):
    """One ``FlatParams`` per layer, by ``ParamSpec.layer``. All are free at first; views survive ``free``."""

    def __init__(
        self, specs: Sequence[ParamSpec], boxes: Mapping[str, Box], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layer_of = {spec.name: spec.layer for spec in specs if spec.name in boxes}
        self._layers: dict[int, FlatParams] = {}
        for layer in sorted(set(self.layer_of.values())):
            own = {name: box for name, box in boxes.items() if self.layer_of[name] == layer}
            self._layers[layer] = FlatParams(specs, own, dtype, device)
            self._layers[layer].free()

    def __contains__(self, layer: object) -> bool:
        return layer in self._layers

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, layer: int) -> FlatParams:
        return self._layers[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def view(self, *names: str) -> Tensor:
        """Return parameters of one layer as ``FlatParams.view`` does, also while the layer has no memory."""
        flat = self._layers[self.layer_of[names[0]]]
        was_free = flat.is_free
        flat.allocate()
        view = flat.view(*names)
        if was_free:
            flat.free()
        return view


class GatheredParams(FlatParams):
    """The whole parameters of a shard whose memory is that of ``layers`` (ZeRO-3), as the model uses them.

    ``data`` is empty and only has their type and device.
    """

    def __init__(self, specs: Sequence[ParamSpec], boxes: Mapping[str, Box], layers: LayerBuffers) -> None:
        first = layers[next(iter(layers))].data
        super().__init__(specs, boxes, first.dtype, "meta")
        self.data = torch.empty(0, dtype=first.dtype, device=first.device)
        self.layers = layers

    def view(self, *names: str) -> Tensor:
        return self.layers.view(*names)

    def _detached(self, *names: str) -> Tensor:
        return self.view(*names).data  # gathering must not count as a modification of what autograd has saved
