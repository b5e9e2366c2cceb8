"""Messages and pieces of a layer have every element once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.param_box import box_shape
from realhf.plan.compile.layer_shares import layer_shares, owned_pieces

SHAPES = st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=4), min_size=1, max_size=5)


@given(SHAPES, st.integers(2, 5).flatmap(lambda n: st.permutations(range(n))))
def test_messages_have_every_element_once(shapes: list[list[int]], members: list[int]) -> None:
    """Boxes do not start at zero, as those of later tensor-parallel ranks."""
    boxes = {str(i): tuple((3, 3 + size) for size in shape) for i, shape in enumerate(shapes)}
    found = layer_shares(boxes, members)
    counts = {name: np.zeros([10] * len(box)) for name, box in boxes.items()}
    used = np.zeros((len(members), found.width))
    for part in found.parts:
        counts[part.name][tuple(slice(*side) for side in part.box)] += 1
        assert part.stop - part.start == np.prod(box_shape(part.box))
        used[part.member, part.start : part.stop] += 1
    for name, box in boxes.items():
        assert (
            counts[name].sum()
            == (counts[name][tuple(slice(*side) for side in box)] == 1).sum()
            == np.prod(box_shape(box))
        )
    assert used.max() == 1 and (used.sum(0) > 0).all(), "no column of the messages is unused by all"


@given(SHAPES, st.integers(2, 4))
def test_even_shares_are_equal_slices_of_rows(shapes: list[list[int]], n: int) -> None:
    boxes = {str(i): tuple((0, size) for size in (n * shape[0], *shape[1:])) for i, shape in enumerate(shapes)}
    found = layer_shares(boxes, range(n))
    assert found.is_even and not layer_shares(boxes, [*range(n)][::-1]).is_even
    for part in found.parts:
        rows = boxes[part.name][0][1] // n
        assert part.box[0] == (part.member * rows, (part.member + 1) * rows)
        assert (part.start, part.stop) == next((p.start, p.stop) for p in found.parts if p.name == part.name)
    assert not layer_shares(boxes | {"odd": ((0, n + 1),)}, range(n)).is_even


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), min_size=1, max_size=8), st.integers(1, 40),
       st.integers(1, 25))  # fmt: skip
def test_owned_pieces_have_every_element_once(gaps: list[tuple[int, int]], size: int, limit: int) -> None:
    spans, at, start = [], 0, 0
    for gap, length in gaps:
        at += gap
        spans.append((start, range(at, at + length)))
        at, start = at + length, start + length
    pieces = [*owned_pieces(spans, size, limit)]
    elements = [i for _, span in spans for i in span]
    assert [i for piece in pieces for i in piece.span] == elements
    assert [piece.start for piece in pieces] == [elements.index(piece.span[0]) for piece in pieces]
    assert all({i // size for i in piece.span} == {piece.owner} and len(piece.span) <= limit for piece in pieces)
    if all(gap == 0 for gap, _ in gaps[1:]):
        assert len(pieces) <= len(elements) // min(size, limit) + 2 + len(elements) // size
