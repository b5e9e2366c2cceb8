"""Strategies, meshes and coordinates."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.layout import Coord, DeviceMesh, Layout, ParallelStrategy
from tests.scaling import examples

DEGREES = st.integers(1, 4)


@pytest.mark.parametrize(
    ("text", "degrees"),
    [
        ("d4t2p1", (4, 2, 1)),
        ("d4p1m2", (4, 2, 1)),
        ("m2p3d1", (1, 2, 3)),
        ("D4T2P1", (4, 2, 1)),
        ("d2", (2, 1, 1)),
        ("p12", (1, 1, 12)),
        (" t3 ", (1, 3, 1)),
    ],
)
def test_strategies_are_parsed_in_any_order_and_case(text: str, degrees: tuple[int, int, int]) -> None:
    strategy = ParallelStrategy.parse(text)
    assert (strategy.dp, strategy.tp, strategy.pp) == degrees
    assert ParallelStrategy.parse(str(strategy)) == strategy


@pytest.mark.parametrize(
    "text", ["", "d", "4", "d0", "d01", "d-1", "d4p1m1xyz", "xd4", "d4 t2", "d4,t2", "d4x2", "d4d2", "t2m2", "d1t1p1d1"]
)
def test_an_invalid_strategy_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}'"):
        ParallelStrategy.parse(text)


@given(DEGREES, DEGREES, DEGREES, st.booleans())
def test_strategies_are_parsed_from_their_text(dp: int, tp: int, pp: int, wanted: bool) -> None:
    strategy = ParallelStrategy(dp, tp, pp).with_zero3(wanted)
    assert ParallelStrategy.parse(str(strategy)) == ParallelStrategy.parse(str(strategy).upper()) == strategy
    assert strategy.zero3 == (wanted and dp > 1) and strategy.with_zero3(False) == ParallelStrategy(dp, tp, pp)
    numbers = [strategy.shard_number(d, t) for d in range(dp) for t in range(tp)]
    assert set(numbers) == set(range(strategy.n_shards)) and len(numbers) == strategy.n_shards * strategy.n_replicas
    assert all(numbers.count(number) == strategy.n_replicas for number in numbers)


def test_zero3_needs_several_data_parallel_ranks() -> None:
    with pytest.raises(ValueError, match="leave out z3"):
        ParallelStrategy.parse("t2z3")
    for text in ("d2z2", "z3d2", "d2z3z3", "z3"):
        with pytest.raises(ValueError, match=f"'{text}' is not a parallel strategy"):
            ParallelStrategy.parse(text)


@given(DEGREES, st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_chunks_of_layers_are_parsed(dp: int, pp: int, vpp: int, wanted: bool) -> None:
    if pp == 1 and vpp > 1:
        with pytest.raises(ValueError, match=f"leave out v{vpp}"):
            ParallelStrategy(dp, pp=pp, vpp=vpp)
        return
    strategy = ParallelStrategy(dp, pp=pp, vpp=vpp).with_zero3(wanted)
    assert ParallelStrategy.parse(str(strategy)) == strategy and ("v" in str(strategy)) == (vpp > 1)
    assert strategy.world == dp * pp and ParallelStrategy.parse(f"v{vpp}p{pp}d{dp}") == strategy.with_zero3(False)


def test_chunks_that_cannot_be_parsed() -> None:
    for text in ("p2v", "p2v0", "v2v2", "p2vv2", "p2v-1", "p2v1.5"):
        with pytest.raises(ValueError, match=f"'{text}'"):
            ParallelStrategy.parse(text)


def test_a_degree_is_positive() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        ParallelStrategy(dp=0)
    with pytest.raises(ValueError, match="gives the tp degree twice"):
        ParallelStrategy.parse("t2m2")


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("node01:0-3", (0, 1, 2, 3)),
        ("node02:1", (5,)),
        ("node[01-02]", (*range(8),)),
        ("node01,node02", (*range(8),)),
        ("node02,node01", (4, 5, 6, 7, 0, 1, 2, 3)),
        ("NODE[01-02,05],NODE07:0,1", (*range(8), 16, 17, 18, 19, 24, 25)),
        ("Node[1,3]:0-1,3", (0, 1, 3, 8, 9, 11)),
        ("node01:0,2,node02:1-2", (0, 2, 5, 6)),
        ("0-2,5", (0, 1, 2, 5)),
        ("7", (7,)),
        (" node1:0 , 1 , node02:3 ", (0, 1, 7)),
        ("3,node02:0", (3, 4)),
        ("trn3", (8, 9, 10, 11)),
    ],
)
def test_meshes_are_parsed_in_every_form(text: str, ranks: tuple[int, ...]) -> None:
    mesh = DeviceMesh.parse(text, n_nodes=7, n_per_node=4)
    assert mesh.ranks == ranks
    assert DeviceMesh.parse(str(mesh), 7, 4) == mesh


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the device mesh is empty"),
        ("node08", "names node 8, but there are nodes 1 to 7"),
        ("node00", "names node 0"),
        ("node[06-08]", "names node 8"),
        ("node01:4", "names slot 4, but there are slots 0 to 3"),
        ("28", "names worker 28, but there are workers 0 to 27"),
        ("0-999999999999", "names worker 999999999999"),
        ("node01:3-1", "the range 3-1 is descending"),
        ("node01,0", "a worker twice"),
        ("node01:0,0", "a worker twice"),
        ("node", "'node' in device mesh"),
        ("node01]", "is not like node01"),
        ("node01:", "is not like"),
        ("node01:0-", "is not like"),
        ("node01::0", "is not like"),
        ("node01:0;node02", "is not like"),
        ("node[01-02", "is not like"),
        ("node[]", "is not like"),
        ("node01,", "is not like"),
        ("node01,,node02", "is not like"),
        ("0 1", "is not like"),
        ("-1", "is not like"),
    ],
)
def test_an_invalid_mesh_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        DeviceMesh.parse(text, n_nodes=7, n_per_node=4)


def test_a_mesh_has_distinct_ranks() -> None:
    for ranks in [(), (0, 0), (-1, 0)]:
        with pytest.raises(ValueError, match="distinct ranks"):
            DeviceMesh(ranks)
    assert [str(DeviceMesh(ranks)) for ranks in [(3,), (0, 1, 2), (0, 2), (1, 0)]] == ["3", "0-2", "0,2", "1,0"]


@settings(max_examples=examples(50))
@given(DEGREES, DEGREES, DEGREES, st.randoms(use_true_random=False))
def test_coordinates_and_ranks_are_one_to_one(dp: int, tp: int, pp: int, rng: object) -> None:
    strategy = ParallelStrategy(dp, tp, pp)
    ranks = rng.sample(range(200), strategy.world)
    layout = Layout(DeviceMesh(tuple(ranks)), strategy)
    coords = [Coord(p, d, t) for p in range(pp) for d in range(dp) for t in range(tp)]
    assert [layout.rank(coord) for coord in coords] == ranks
    assert [layout.coord(rank) for rank in ranks] == coords
    for name, degree in [("dp", dp), ("tp", tp), ("pp", pp)]:
        groups = {layout.axis(name, rank) for rank in ranks}
        assert sorted(rank for group in groups for rank in group) == sorted(ranks)
        assert {len(group) for group in groups} == {degree}
        assert all(rank in layout.axis(name, rank) for rank in ranks)
    heads = layout.dp_heads()
    assert [layout.coord(head) for head in heads] == [Coord(pp - 1, d, 0) for d in range(dp)]


def test_a_tensor_parallel_group_is_contiguous() -> None:
    layout = Layout(DeviceMesh(tuple(range(8))), ParallelStrategy(2, 2, 2))
    assert layout.axis("tp", 2) == (2, 3) and layout.axis("dp", 2) == (0, 2) and layout.axis("pp", 2) == (2, 6)
    assert layout.dp_heads() == (4, 6) and str(layout) == "d2t2p2@0-7"


def test_mesh_and_strategy_must_fit() -> None:
    with pytest.raises(ValueError, match="d2t2p1 needs 4 workers, mesh 0-1 has 2"):
        Layout(DeviceMesh((0, 1)), ParallelStrategy(2, 2))
    with pytest.raises(ValueError):
        Layout(DeviceMesh((0, 1)), ParallelStrategy(2)).coord(5)
