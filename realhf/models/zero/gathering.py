"""Weights of ZeRO-3: every data-parallel rank has a share of each parameter; layers are gathered for their use."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.api.param_box import box_shape, relative
from realhf.comm.process_groups import Group
from realhf.models.flat_params import FlatParams
from realhf.models.zero.layer_buffers import LayerBuffers
from realhf.plan.compile.layer_shares import LayerShares


@dataclass(frozen=True)
class LayerMessages:
    """Copies between the whole parameters of a layer and the messages of all members of a group, ``[size, width]``.

    ``own`` are the spans of this member's share in the flat tensor of its shard, in the order of its message.
    """

    shares: Mapping[int, LayerShares]
    own: Mapping[int, tuple[slice, ...]]
    group: Group

    def new(self, layer: int, like: Tensor) -> Tensor:
        return like.new_empty(self.group.size, self.shares[layer].width)

    def unpack(self, layer: int, messages: Tensor, whole: FlatParams) -> None:
        for part, elements in self._pairs(layer, messages, whole):
            part.copy_(elements)

    def pack(self, layer: int, messages: Tensor, whole: FlatParams) -> None:
        for part, elements in self._pairs(layer, messages, whole):
            elements.copy_(part)

    def own_parts(self, layer: int, message: Tensor, shard: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (elements of this member's message, the same elements of its flat tensor)."""
        start = 0
        for span in self.own[layer]:
            stop = start + span.stop - span.start
            yield message[start:stop], shard[span]
            start = stop

    def _pairs(self, layer: int, messages: Tensor, whole: FlatParams) -> Iterator[tuple[Tensor, Tensor]]:
        shares, size = self.shares[layer], self.group.size
        if shares.is_even:  # one copy for all members
            for part in (part for part in shares.parts if part.member == 0):
                yield whole.view(part.name).view(size, -1), messages[:, part.start : part.stop]
            return
        for part in shares.parts:
            elements = messages[part.member, part.start : part.stop].view(box_shape(part.box))
            yield whole.view(part.name)[relative(part.box, whole.box(part.name))], elements


@dataclass
class WeightGathering:
    """Gathers the weights of layers from ``shard`` into ``layers``."""

    shard: FlatParams
    layers: LayerBuffers
    messages: LayerMessages
    _pending: dict[int, tuple[dist.Work, Tensor, Tensor]] = field(default_factory=dict)

    @torch.no_grad()
    def start(self, layer: int) -> None:
        """Start to gather a layer, unless it is gathered."""
        if layer not in self.layers or layer in self._pending or not self.layers[layer].is_free:
            return
        received = self.messages.new(layer, self.shard.data)
        own = self.shard.data.new_zeros(received.shape[1])
        for elements, stored in self.messages.own_parts(layer, own, self.shard.data):
            elements.copy_(stored)
        self._pending[layer] = self.messages.group.start_all_gather(received, own), received, own

    @torch.no_grad()
    def wait(self, layer: int) -> None:
        """Wait until a layer is gathered."""
        self.start(layer)
        if layer in self._pending:
            work, received, _ = self._pending.pop(layer)
            self.messages.group.wait(work, "all_gather", received)
            whole = self.layers[layer]
            whole.allocate()
            self.messages.unpack(layer, received, whole)

    def free(self, layer: int) -> None:
        if layer in self.layers and not self.layers[layer].is_free:
            self.layers[layer].free()
