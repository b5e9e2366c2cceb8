"""Sums gradients over replicas during the backward pass: bucket by bucket, from the last layer to the first.

A bucket is a part of one rank's range of the flat gradient and is reduced to that rank, so the result is where a
reduce-scatter of the whole gradient would leave it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch.distributed as dist
from torch import Tensor

from realhf.comm.process_groups import Group
from realhf.models.flat_params import FlatParams

BUCKET_NUMEL = 1 << 25
"""Most elements of a bucket: 128 MB, which take long enough to hide the start of the operation."""


@dataclass(frozen=True)
class ParamRange:
    """Where a parameter is in the flat gradient, and its layer; ``is_late``: it is complete after the backward pass."""

    start: int
    stop: int
    layer: int
    is_late: bool = False


@dataclass(frozen=True)
class Bucket:
    """Elements of the flat gradient that belong to rank ``owner``; the lowest ``layer`` of its parameters."""

    start: int
    stop: int
    owner: int
    layer: int
    is_late: bool


def plan_buckets(params: Iterable[ParamRange], range_size: int, max_numel: int) -> tuple[Bucket, ...]:
    """Divide the flat gradient into buckets, in the order in which they are reduced.

    Every rank owns ``range_size`` elements. The order is the same on all replicas: higher layers first, late ones last.
    """
    pieces = [
        ParamRange(max(param.start, at), min(param.stop, at + range_size), param.layer, param.is_late)
        for param in sorted(params, key=lambda param: param.start)
        for at in range(param.start // range_size * range_size, param.stop, range_size)
    ]
    buckets: list[Bucket] = []
    for (owner, is_late), some in groupby(pieces, key=lambda piece: (piece.start // range_size, piece.is_late)):
        for piece in some:
            last = buckets[-1] if buckets else Bucket(0, 0, -1, 0, False)
            follows = last.stop == piece.start and (last.owner, last.is_late) == (owner, is_late)
            if follows and piece.stop - last.start <= max_numel:
                buckets[-1] = Bucket(last.start, piece.stop, owner, min(last.layer, piece.layer), is_late)
                continue
            buckets += [
                Bucket(at, min(at + max_numel, piece.stop), owner, piece.layer, is_late)
                for at in range(piece.start, piece.stop, max_numel)
            ]
    return tuple(sorted(buckets, key=lambda bucket: (bucket.is_late, -bucket.layer, bucket.start)))


class OverlappedReduction:
    """Reduces a shard's gradient over its replicas during the last backward pass of a step.

    ``grad`` is that of the first segment. The gradients of ``late`` parameters change after the backward pass.
    Operations start in the order of ``plan_buckets``, which all replicas share. The last backward pass of a step, or
    of each of its chunks of layers in descending order, runs in ``last_backward``. ``backward_ended`` is called after
    it, before any other collective of the group, and also by replicas without rows.
    """

    def __init__(self, params: FlatParams, grad: Tensor, group: Group, late: frozenset[str]) -> None:
        spans = [(params.span(name), params.spec(name).layer, name in late) for name in params.names]
        ranges = [ParamRange(span.start, span.stop, layer, is_late) for span, layer, is_late in spans
                  if span.stop <= len(grad)]  # fmt: skip
        self.buckets = plan_buckets(ranges, len(grad) // group.size, BUCKET_NUMEL)
        self._grad, self._group = grad, group
        self._pending: list[dist.Work] = []
        self._is_last_backward = False

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Reduce gradients that are complete during the backward pass in this context."""
        self._is_last_backward = True
        yield
        self._is_last_backward = False

    def backward_reached(self, layer: int, _grad: Tensor | None = None) -> None:
        """Reduce what is complete when the gradient of the input of ``layer`` is known: all layers after it."""
        if self._is_last_backward:
            while self._next is not None and self._next.layer > layer and not self._next.is_late:
                self._reduce(self._next)

    def backward_ended(self) -> None:
        """Reduce all gradients that are complete after the backward pass."""
        with self.last_backward():
            self.backward_reached(-1)

    def finish(self) -> None:
        """Reduce the rest and wait for all. Collective over the replicas."""
        while self._next is not None:
            self._reduce(self._next)
        for bucket, work in zip(self.buckets, self._pending, strict=True):
            self._group.wait(work, "reduce", self._grad[bucket.start : bucket.stop])
        self._pending.clear()

    @property
    def _next(self) -> Bucket | None:
        return self.buckets[len(self._pending)] if len(self._pending) < len(self.buckets) else None

    def _reduce(self, bucket: Bucket) -> None:
        self._pending.append(self._group.start_reduce(self._grad[bucket.start : bucket.stop], bucket.owner))
