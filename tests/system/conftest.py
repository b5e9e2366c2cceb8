"""Run specs for tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from realhf.api.config import DatasetConfig, ExperimentConfig, ExperimentControl
from realhf.api.execution_plan import ExecutionPlan, Placement
from realhf.api.experiment import RoleSpec, Task
from realhf.api.graph import Graph
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.base.paths import RunDir
from realhf.plan.run_spec import RunSpec


def layout_on(*ranks: int) -> Layout:
    return Layout(DeviceMesh(ranks), ParallelStrategy(dp=len(ranks)))


def run_of(
    graph: Graph,
    meshes: dict[str, tuple[int, ...]],
    root: Path,
    n_rows: int = 4,
    batch: int = 2,
    roles: dict[str, RoleSpec] | None = None,
    **control: int,
) -> RunSpec:
    """Return a run of ``graph`` with every MFC data-parallel on its mesh."""
    config = ExperimentConfig(dataset=DatasetConfig(train_bs_n_seqs=batch), exp_ctrl=ExperimentControl(**control))
    plan = ExecutionPlan(
        1 + max(rank for mesh in meshes.values() for rank in mesh),
        {name: Placement(layout_on(*mesh)) for name, mesh in meshes.items()},
    )
    return RunSpec("test", config, Task.prompt, graph, roles or {}, plan, RunDir(root), "cpu", n_rows)


@pytest.fixture(scope="session")
def make_run() -> Callable[..., RunSpec]:
    return run_of
