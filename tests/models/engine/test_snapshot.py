"""Snapshots of engines can be restored in any layout."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from realhf.api.config import ModelSpec, OptimizerConfig
from realhf.api.experiment import RoleSpec
from realhf.api.layout import AXES, DeviceMesh, Layout, ParallelStrategy
from realhf.arch.hf_config import read_hf_config
from realhf.arch.param_specs import param_specs
from realhf.comm.process_groups import Group, ParallelContext
from realhf.models.engine.native import NativeEngine, empty_shard
from realhf.models.engine.optimizer import ShardedAdamW
from realhf.models.engine.pipeline_runner import Pipeline
from realhf.models.engine.snapshot import restore, snapshot
from realhf.models.transformer import Transformer
from tests.models.tiny_models import hf_model
from tests.scaling import subset

EXPERTS = ("d1", "d2e2", "t2e2", "d2t2e4", "d4e2", "d2p2e2", "d2", "t2p2", "d2z3")
STRATEGIES = ("d1", "d2", "t2", "p2", "p2v2", "d2t2", "t2p2", "t2p2v2", "d3z3", "d2t2z3", "d2p2z3", "d2p2v2z3", "c2",
              "d2c2", "c2p2")  # fmt: skip
KINDS = {"weights": 0.0, "first": 0.25, "second": 0.5, "master": 0.75, "average": 0.875}


def layout_of(name: str) -> Layout:
    strategy = ParallelStrategy.parse(name)
    return Layout(DeviceMesh(tuple(reversed(range(strategy.world)))), strategy)  # groups are ordered by rank


def engine_of(folder: Path, layout: Layout, rank: int, bf16: bool) -> NativeEngine:
    """Return the engine of one rank, with its shard and optimizer but without communication."""
    config = read_hf_config(folder, scalar_head=False)
    dtype = torch.bfloat16 if bf16 else torch.float32
    params = empty_shard(config, layout, rank, dtype, "cpu", 1 if layout.strategy.zero3 else layout.strategy.weight_dp)
    groups = {ranks: Group(ranks, rank) for axis in AXES if len(ranks := layout.axis(axis, rank)) > 1}
    context = ParallelContext(layout, rank, groups=groups)
    model = Transformer(config, params, False, context.group("tp"), True)
    optimizer = ShardedAdamW(params, OptimizerConfig(), context, model.sequence_parallel)
    role = RoleSpec(ModelSpec(str(folder), bf16=bf16))
    return NativeEngine(config, role, params, model, Pipeline(model, context), context, (1,), 10, optimizer=optimizer)


def expected_values(engine: NativeEngine) -> dict[str, Tensor]:
    """Return random full parameters, which are the same on every worker."""
    values = {}
    for i, spec in enumerate(param_specs(engine.config)):
        generator = torch.Generator().manual_seed(i)
        values[spec.name] = torch.randint(0, 100, spec.shape, generator=generator).float()  # exact in bfloat16 too
    return values


def fill(engine: NativeEngine, flat: Tensor, start: int, kind: str) -> None:
    """Fill a flat tensor, which starts at element ``start`` of the shard, with the values of ``kind``."""
    for name, expected in expected_values(engine).items():
        if name in engine.params.names:
            box = tuple(slice(*span) for span in engine.params.box(name))
            values, span = (expected[box] + KINDS[kind]).flatten(), engine.params.span(name)
            low, high = max(span.start, start), min(span.stop, start + len(flat))
            if low < high:
                flat[low - start : high - start] = values[low - span.start : high - span.start].to(flat.dtype)


def trained(folder: Path, layout: Layout, rank: int, bf16: bool, average: bool) -> NativeEngine:
    engine = engine_of(folder, layout, rank, bf16)
    assert engine.optimizer is not None
    fill(engine, engine.params.data, 0, "weights")
    for some in engine.optimizer.ranges:
        for kind, flat in some.state.items():
            fill(engine, flat, some.start, kind)
    if average:
        engine.params.average = torch.zeros_like(engine.params.data, dtype=torch.float32)
        fill(engine, engine.params.average, 0, "average")
    engine.optimizer.steps = 7
    return engine


@pytest.fixture(scope="module")
def deep_folder(actor_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.json of a model with enough layers for two chunks per stage."""
    config, folder = json.loads((actor_folder / "config.json").read_text()), tmp_path_factory.mktemp("deep")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    return folder


@pytest.fixture(scope="module")
def routed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routed")
    hf_model("qwen3_moe_some").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("folder, strategies", [("deep_folder", STRATEGIES), ("routed_folder", EXPERTS)])
def test_any_layout_restores_the_snapshot_of_any_other(
    folder: str, strategies: tuple[str, ...], bf16: bool, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(folder)
    for before, after in subset(product(strategies, strategies), 5 * len(strategies)):
        old, new = layout_of(before), layout_of(after)
        files = {rank: snapshot(trained(model, old, rank, bf16, bf16)) for rank in old.mesh.ranks}
        for rank in new.mesh.ranks:
            engine, expected = engine_of(model, new, rank, bf16), trained(model, new, rank, bf16, bf16)
            restore(engine, old, files.__getitem__)
            assert engine.optimizer is not None and expected.optimizer is not None and engine.optimizer.steps == 7
            assert torch.equal(engine.params.data, expected.params.data), (before, after, rank)
            for kind, flat in expected.optimizer.state.items():
                assert torch.equal(engine.optimizer.state[kind], flat), (before, after, rank, kind)
            if bf16:
                assert engine.params.average is not None and expected.params.average is not None
                assert torch.equal(engine.params.average, expected.params.average)


def test_replicas_save_disjoint_tensors(actor_folder: Path) -> None:
    layout = layout_of("d2")
    found = {rank: snapshot(trained(actor_folder, layout, rank, False, False)) for rank in layout.mesh.ranks}
    writer = layout.rank(layout.coord(0)._replace(dp=0))
    assert "weights" in found[writer] and "weights" not in found[1 - writer]
    assert len(found[0]["first"]) == len(found[1]["first"]) == len(found[writer]["weights"]) // 2
    assert "master" not in found[0], "float32 weights are their own master"


def test_workers_of_a_zero3_layout_save_disjoint_weights(actor_folder: Path) -> None:
    layout = layout_of("d3z3")
    found = {rank: snapshot(trained(actor_folder, layout, rank, True, False)) for rank in layout.mesh.ranks}
    sizes = [len(state["weights"]) for state in found.values()]
    assert sum(sizes) == sum(spec.numel for spec in param_specs(read_hf_config(actor_folder, scalar_head=False)))
    assert all(len(state[kind]) == len(state["weights"]) for state in found.values() for kind in ("first", "master"))
