"""Shares of a layer in the messages of its data-parallel ranks (ZeRO-3), and pieces that ranks own (ZeRO-2)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from realhf.api.param_box import Box, box_numel, cut_box


@dataclass(frozen=True)
class Share:
    """``box`` of a parameter is elements ``start`` to ``stop`` of the message of a group's ``member``."""

    name: str
    member: int
    box: Box
    start: int
    stop: int


@dataclass(frozen=True)
class LayerShares:
    """The shares of a layer in messages of equal size ``width``, of which the last elements may be unused.

    ``is_even``: member i has the i-th of equal slices of rows of every parameter, at the same place of its message.
    """

    width: int
    parts: tuple[Share, ...]
    is_even: bool


def layer_shares(boxes: Mapping[str, Box], members: Sequence[int]) -> LayerShares:
    """Return the shares of parameters with these boxes; ``members`` are data-parallel ranks by number in the group."""
    n, parts, width = len(members), list[Share](), 0
    for member, dp in enumerate(members):
        start = 0
        for name, whole_box in boxes.items():
            if (box := cut_box(whole_box, n, dp)) is not None:
                parts.append(Share(name, member, box, start, start + box_numel(box)))
                start = parts[-1].stop
        width = max(width, start)
    is_even = all((box[0][1] - box[0][0]) % n == 0 for box in boxes.values()) and [*members] == sorted(members)
    return LayerShares(width, tuple(parts), is_even)


@dataclass(frozen=True)
class OwnedPiece:
    """Elements of a layer's buffer from ``start``, which are ``span`` in the flat tensor; rank ``owner`` keeps them."""

    start: int
    span: range
    owner: int


def owned_pieces(spans: Iterable[tuple[int, range]], range_size: int, max_numel: int) -> Iterator[OwnedPiece]:
    """Divide parameters (start in the layer's buffer, span in the flat tensor) into pieces of at most ``max_numel``.

    Rank ``r`` owns the ``r``-th run of ``range_size`` elements of the flat tensor. Adjacent parameters share pieces.
    """
    merged: list[tuple[int, range]] = []
    for start, span in spans:
        if merged:
            before, last = merged[-1]
            if last.stop == span.start and before + len(last) == start:
                merged[-1] = before, range(last.start, span.stop)
                continue
        merged.append((start, span))
    for start, span in merged:
        at = span.start
        while at < span.stop:
            owner = at // range_size
            stop = min(span.stop, (owner + 1) * range_size, at + max_numel)
            yield OwnedPiece(start + at - span.start, range(at, stop), owner)
            at = stop
