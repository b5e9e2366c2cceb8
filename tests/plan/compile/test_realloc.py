"""Reallocation between all pairs of layouts on up to eight workers, executed with NumPy."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.api.param_box import Cuts, ParamSpec, box_numel, box_shape, intersect, numbered_box, relative
from realhf.arch.param_specs import param_specs, stage_layers
from realhf.plan.compile.realloc import BoxCopy, Stages, plan_realloc, route_copies, shard_boxes

CONFIG = ModelConfig(
    "llama", n_layers=4, hidden=6, n_heads=4, n_kv_heads=2, head_dim=2, intermediate=9, vocab=11, max_positions=8
)
SPECS = tuple(
    s for s in param_specs(CONFIG) if not s.name.endswith(("wv", "gate", "mlp_norm.weight"))
)  # sharded like others
STAGES = {(pp, vpp): stage_layers(CONFIG, pp, vpp) for pp, vpp in ((1, 1), (2, 1), (3, 1), (2, 2))}
STRATEGIES = [
    ParallelStrategy(dp, tp, pp, vpp=vpp)
    for pp, vpp in STAGES for tp in range(1, 9) for dp in range(1, 9) if dp * tp * pp <= 8
]  # fmt: skip
CONTEXT = [replace(strategy, context=True) for strategy in STRATEGIES if strategy.tp > 1]
SHARDED = [strategy.with_zero3(True) for strategy in STRATEGIES if strategy.dp > 1]


def stages(pp: int, vpp: int) -> tuple[frozenset[int], ...]:
    return STAGES[pp, vpp]


def meshes(src: int, dst: int) -> list[tuple[range, range]]:
    """Return equal or nested meshes, and disjoint ones, or with minimal overlap on eight workers."""
    return [(range(src), range(dst)), (range(src), range(8 - dst, 8))]


def execute(copies: tuple[BoxCopy, ...], held: dict, needed: dict, whole: dict) -> dict[int, dict[str, np.ndarray]]:
    """Copy every box from the array of the sender to that of the receiver."""
    arrays = {r: {n: whole[n][tuple(slice(*s) for s in b)] for n, b in boxes.items()} for r, boxes in held.items()}
    filled = {r: {n: np.full(box_shape(b), -1) for n, b in boxes.items()} for r, boxes in needed.items()}
    for c in copies:
        part = arrays[c.src][c.name][relative(c.box, held[c.src][c.name])]
        filled[c.dst][c.name][relative(c.box, needed[c.dst][c.name])] = part
    return filled


def check(src: Layout, dst: Layout, specs: Sequence[ParamSpec] = SPECS, stages: Stages = stages) -> None:
    copies = tuple(route_copies(plan_realloc(specs, stages, src, dst)))
    held, needed = ({rank: shard_boxes(specs, stages, some, rank) for rank in some.mesh.ranks} for some in (src, dst))
    whole = {spec.name: np.arange(spec.numel).reshape(spec.shape) for spec in specs}
    filled = execute(copies, held, needed, whole)
    received = dict.fromkeys(dst.mesh.ranks, 0)
    for c in copies:
        received[c.dst] += box_numel(c.box) * (c.src != c.dst)
    for rank, boxes in needed.items():
        missing = 0
        for name, box in boxes.items():
            assert (filled[rank][name] == whole[name][tuple(slice(*side) for side in box)]).all(), (src, dst, name)
            own_box = held.get(rank, {}).get(name)
            own = intersect(own_box, box) if own_box else None
            missing += box_numel(box) - (box_numel(own) if own else 0)
        assert received[rank] == missing, (src, dst, rank)


@pytest.mark.parametrize("src", STRATEGIES, ids=str)
def test_all_pairs_of_layouts(src: ParallelStrategy) -> None:
    for dst in STRATEGIES:
        for here, there in meshes(src.world, dst.world):
            check(Layout(DeviceMesh(tuple(here)), src), Layout(DeviceMesh(tuple(there)), dst))


@given(st.data())
def test_zero3_and_context_parallelism_at_the_lower_bound(data: st.DataObject) -> None:
    """Random meshes; some ranks have nothing of a parameter with fewer elements than ranks."""
    pairs = st.tuples(st.sampled_from(SHARDED + CONTEXT), st.sampled_from(STRATEGIES + SHARDED + CONTEXT))
    layouts = []
    for strategy in data.draw(pairs.flatmap(st.permutations)):
        ranks = data.draw(st.permutations(range(data.draw(st.integers(8, 10)))))[: strategy.world]
        layouts.append(Layout(DeviceMesh(tuple(ranks)), strategy))
    check(*layouts)


def test_every_element_is_in_one_share() -> None:
    """Also of few experts, which are cut inside, and of a scalar head."""
    for spec in (
        *SPECS,
        ParamSpec("experts", (2, 5, 3), 1, 1, 5),
        ParamSpec("head", (1, 6), 4),
        ParamSpec("b", (2,), 1),
    ):
        for tp, n in ((1, 2), (1, 4), (2, 3), (3, 5)):
            if spec.tp_dim is None or tp <= spec.tp_units:
                counts = np.zeros(spec.shape)
                for number in range(tp * n):
                    if box := numbered_box(spec, Cuts(tp, tp * n), number):
                        counts[tuple(slice(*side) for side in box)] += 1
                assert (counts == (1 if spec.tp_dim is not None else tp)).all(), (spec, tp, n)
    assert numbered_box(ParamSpec("experts", (2, 5, 30), 1, 1, 5), Cuts(1, 10), 9) == ((0, 2), (0, 5), (27, 30))


def test_meshes_in_any_order() -> None:
    src = Layout(DeviceMesh((5, 2, 0, 7)), ParallelStrategy(1, 2, 2))
    for ranks in [(7, 0, 2, 5), (2, 9, 5, 1)]:
        check(src, Layout(DeviceMesh(ranks), ParallelStrategy(2, 2, 1)))


def test_equal_layouts_only_copy_locally() -> None:
    layout = Layout(DeviceMesh((0, 1, 2, 3)), ParallelStrategy(2, 2, 1))
    assert all(c.src == c.dst for c in route_copies(plan_realloc(SPECS, stages, layout, layout)))


def test_senders_are_on_the_same_node_and_share_the_load() -> None:
    src = Layout(DeviceMesh((0, 1, 2, 3)), ParallelStrategy(dp=4))
    dst = Layout(DeviceMesh((4, 5, 6, 7)), ParallelStrategy(dp=4))
    sent = dict.fromkeys(range(4), 0)
    for c in route_copies(plan_realloc(SPECS, stages, src, dst)):
        sent[c.src] += box_numel(c.box)
    assert max(sent.values()) - min(sent.values()) <= max(spec.numel for spec in SPECS)
    near = Layout(DeviceMesh((0, 2)), ParallelStrategy(dp=2))
    far = Layout(DeviceMesh((1, 3)), ParallelStrategy(dp=2))
    node = {(r.src, r.dsts) for r in plan_realloc(SPECS, stages, near, Layout(far.mesh, ParallelStrategy(tp=2)))}
    assert node == {(0, (1,)), (0, (3,)), (0, (1, 3)), (2, (1,)), (2, (3,)), (2, (1, 3))}
    pairs = {(c.src, c.dst) for c in route_copies(plan_realloc(SPECS, stages, near, far, node_size=2))}
    assert pairs == {(0, 1), (2, 3)}
