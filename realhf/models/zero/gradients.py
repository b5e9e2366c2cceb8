"""Gradients of ZeRO-2 and ZeRO-3: those of a layer are reduced after its backward pass; ranks keep their shares."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.comm.process_groups import Group
from realhf.models.flat_params import FlatParams
from realhf.models.zero.gathering import LayerMessages
from realhf.models.zero.layer_buffers import LayerBuffers
from realhf.plan.compile.layer_shares import OwnedPiece

Pending = Sequence[tuple[dist.Work, Tensor, str]]


class LayerGradients(Protocol):
    """The gradients of the layers of a stage, float32. One layer's reduction is in flight at a time."""

    def allocate(self, layer: int) -> None:
        """Give a layer memory with zeros."""

    def reduce(self, layer: int) -> None:
        """Start to reduce the gradient of a layer over the replicas and to add it to this rank's share."""

    def finish(self) -> None:
        """Wait for the reduction in flight."""


class ScatteredGradients:
    """ZeRO-3: a layer is reduce-scattered into the shares of its parameters, which are the gradient of ``shard``."""

    def __init__(self, shard: FlatParams, layers: LayerBuffers, messages: LayerMessages) -> None:
        self.total = shard.enable_grad()
        self._layers, self._messages = layers, messages
        self._pending: tuple[int, dist.Work, Tensor] | None = None

    def allocate(self, layer: int) -> None:
        _allocate_zeros(self._layers[layer])

    @torch.no_grad()
    def reduce(self, layer: int) -> None:
        self.finish()
        packed = self._messages.new(layer, self.total)
        self._messages.pack(layer, packed, self._layers[layer])
        self._layers[layer].free()
        group = self._messages.group
        self._pending = layer, group.start_reduce_scatter(packed[group.index], packed), packed

    @torch.no_grad()
    def finish(self) -> None:
        if self._pending is not None:
            (layer, work, packed), self._pending = self._pending, None
            group = self._messages.group
            group.wait(work, "reduce_scatter", packed)
            for reduced, total in self._messages.own_parts(layer, packed[group.index], self.total):
                total.add_(reduced)


class OwnedGradients:
    """ZeRO-2: pieces of a layer are reduced to the ranks that own them in the flat tensor of all weights.

    ``total`` is the gradient of this rank's range. Gradients of ``late`` parameters, which members of a replica share,
    are summed over the replica at the end of a step: until then every rank keeps them.
    """

    def __init__(
        self, layers: LayerBuffers, pieces: Mapping[int, Sequence[OwnedPiece]], late: FlatParams,
        late_pieces: Sequence[OwnedPiece], total: Tensor, first: int, group: Group,
    ) -> None:  # fmt: skip
        self.total, self.late = total, late
        self.layers, self._pieces, self._late_pieces = layers, pieces, late_pieces
        self._first, self._group = first, group
        self._in_flight: int | None = None
        self._works: list[dist.Work] = []

    def allocate(self, layer: int) -> None:
        if layer == self._in_flight:
            self.finish()
        _allocate_zeros(self.layers[layer])

    @torch.no_grad()
    def reduce(self, layer: int) -> None:
        self.finish()
        flat = self.layers[layer]
        for name in flat.names:
            if name in self.late.names:
                self.late.view(name).add_(flat.view(name))
        self._works = self._start(flat.data, self._pieces[layer])
        self._in_flight = layer

    @torch.no_grad()
    def finish(self) -> None:
        if self._in_flight is not None:
            flat = self.layers[self._in_flight]
            self._add(flat.data, self._pieces[self._in_flight], self._works)
            flat.free()
            self._in_flight = None

    def zero(self) -> None:
        """Drop the accumulated gradient."""
        self.total.zero_()
        self.late.data.zero_()

    @torch.no_grad()
    def reduce_late(self) -> None:
        """Reduce the gradients of the late parameters. Collective over the replicas."""
        self.finish()
        self._add(self.late.data, self._late_pieces, self._start(self.late.data, self._late_pieces))

    def _start(self, flat: Tensor, pieces: Sequence[OwnedPiece]) -> list[dist.Work]:
        return [self._group.start_reduce(_elements(flat, piece), piece.owner) for piece in pieces]

    def _add(self, flat: Tensor, pieces: Sequence[OwnedPiece], works: Sequence[dist.Work]) -> None:
        for piece, work in zip(pieces, works, strict=True):
            elements = _elements(flat, piece)
            self._group.wait(work, "reduce", elements)
            if piece.owner == self._group.index:
                self.total[piece.span.start - self._first : piece.span.stop - self._first].add_(elements)


def _elements(flat: Tensor, piece: OwnedPiece) -> Tensor:
    return flat[piece.start : piece.start + len(piece.span)]


def _allocate_zeros(flat: FlatParams) -> None:
    flat.allocate()
    with torch.no_grad():
        flat.data.zero_()
