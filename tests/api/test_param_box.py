"""Boxes, compared with numpy slices."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.param_box import Box, ParamSpec, box_numel, box_shape, intersect, relative, shard_box, whole
from tests.scaling import examples

SHAPE = (7, 5)
SIDE = [st.tuples(st.integers(0, n - 1), st.integers(1, n)).map(lambda p: (p[0], max(p[0] + 1, p[1]))) for n in SHAPE]
BOX = st.tuples(*SIDE)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*side) for side in box)


def mask(box: Box) -> np.ndarray:
    array = np.zeros(SHAPE, bool)
    array[slices(box)] = True
    return array


@settings(max_examples=examples(50))
@given(BOX, BOX)
def test_the_intersection_is_covered_by_both_boxes(a: Box, b: Box) -> None:
    common, both = intersect(a, b), mask(a) & mask(b)
    assert (common is None) == (not both.any())
    if common is not None:
        assert (mask(common) == both).all() and box_numel(common) == both.sum()
        assert intersect(b, a) == common


@settings(max_examples=examples(50))
@given(BOX, BOX)
def test_relative_slices_select_a_box_in_its_origin(a: Box, b: Box) -> None:
    array = np.arange(35).reshape(SHAPE)
    if (common := intersect(a, b)) is not None:
        for origin in (a, b):
            selected = array[slices(origin)][relative(common, origin)]
            assert selected.shape == box_shape(common) and (selected == array[slices(common)]).all()


@settings(max_examples=examples(50))
@given(st.integers(1, 12), st.integers(1, 3), st.integers(1, 8), st.sampled_from([0, 1]))
def test_shards_tile_a_parameter(units: int, width: int, tp: int, tp_dim: int) -> None:
    shape = (units * width, 3) if tp_dim == 0 else (3, units * width)
    boxes = [shard_box(ParamSpec("w", shape, 0, tp_dim, units), tp, rank) for rank in range(tp)]
    covered = np.zeros(shape, int)
    for box in set(boxes):
        covered[slices(box)] += 1
    assert (covered == 1).all()
    sizes = [box_shape(box)[tp_dim] // width for box in boxes]
    assert boxes == sorted(boxes) and all(box_shape(box)[tp_dim] % width == 0 for box in boxes)
    if units < tp:
        copies = [boxes.count(box) for box in set(boxes)]
        assert set(sizes) == {1} and len(set(boxes)) == units and max(copies) - min(copies) <= 1
    else:
        assert sum(sizes) == units and max(sizes) - min(sizes) <= 1


def test_two_key_value_heads_on_four_ranks_are_replicated() -> None:
    spec = ParamSpec("wk", (8, 6), 1, 0, 2)
    assert [shard_box(spec, 4, rank)[0] for rank in range(4)] == [(0, 4), (0, 4), (4, 8), (4, 8)]


def test_uneven_units_give_uneven_shards() -> None:
    spec = ParamSpec("wq", (10, 6), 1, 0, 5)
    assert [shard_box(spec, 2, rank)[0] for rank in range(2)] == [(0, 4), (4, 10)]


@pytest.mark.parametrize("tp", [1, 4])
def test_a_parameter_without_a_tp_dimension_is_replicated(tp: int) -> None:
    spec = ParamSpec("norm", (6,), 1)
    assert {shard_box(spec, tp, rank) for rank in range(tp)} == {whole((6,))}
    assert spec.numel == 6 and ParamSpec("w", (3, 4), 0).numel == box_numel(whole((3, 4))) == 12
