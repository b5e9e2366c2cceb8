"""ZeRO-2 and ZeRO-3 train models as one worker does: same losses, gradient norms and weights, and the same files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from realhf.api.config import LRSchedule, ModelSpec, OptimizerConfig
from realhf.api.config.choices import Recompute
from realhf.api.execution_plan import MicroBatching
from realhf.api.experiment import RoleSpec
from realhf.api.layout import AXES, DeviceMesh, Layout, ParallelStrategy
from realhf.api.messages import Stats
from realhf.arch.hf_config import read_hf_config
from realhf.comm.process_groups import ParallelContext, make_groups
from realhf.models.engine import grad_reduction
from realhf.models.engine.native import NativeEngine, build_engine
from tests.models.sharding import LENGTHS, TEMPERATURE, batch_of, likelihood, regression
from tests.models.tiny_models import hf_model

pytestmark = [pytest.mark.dist, pytest.mark.slow]
MODELS = ("llama", "qwen3", "llama_tied", "gpt2", "gemma2", "qwen3_moe", "qwen3_next", "llama critic")
STEPS = 3
# a large epsilon makes steps smooth in the gradient; clipping, since the norm is above 0.5
ADAM = {"lr": 0.02, "eps": 1e-2, "gradient_clipping": 0.5, "lr_scheduler_type": LRSchedule.constant}


@dataclass(frozen=True)
class Case:
    layout: Layout
    stage: int = 1
    sequence: bool = True
    recompute: Recompute | None = None


def _case(mesh: Sequence[int], text: str, stage: int, **options: Any) -> Case:
    return Case(Layout(DeviceMesh(tuple(mesh)), ParallelStrategy.parse(text)), stage, **options)


CASES: Mapping[str, Case] = {
    "whole": _case((0,), "d1", 1),
    "d2": _case((2, 3), "d2", 2),
    "d2z3": _case((1, 2), "d2z3", 3),
    "d3z3": _case((3, 0, 2), "d3z3", 3),  # uneven shares
    "d4": _case((0, 1, 2, 3), "d4", 2),
    "d4z3": _case((2, 0, 1, 3), "d4z3", 3),
    "d2t2": _case((1, 0, 3, 2), "d2t2", 2),
    "d2t2z3": _case((0, 2, 1, 3), "d2t2z3", 3),
    "d2p2": _case((0, 1, 2, 3), "d2p2", 2),
    "d2p2z3": _case((3, 1, 2, 0), "d2p2z3", 3),
    "d2t2 without sequence": _case((0, 1, 2, 3), "d2t2", 2, sequence=False),
    "d2t2z3 without sequence": _case((0, 1, 2, 3), "d2t2z3", 3, sequence=False),
    "d4z3 recomputed": _case((0, 1, 2, 3), "d4z3", 3, recompute=Recompute.full),
    "d2p2z3 selective": _case((0, 1, 2, 3), "d2p2z3", 3, recompute=Recompute.selective),
}
OTHERS = tuple(name for name in CASES if name != "whole")


@dataclass(frozen=True)
class Trained:
    """Statistics of every step of a worker, and log-probabilities or values of its rows after them."""

    dp: int
    stats: list[Stats]
    columns: dict[int, Tensor]


def engine_of(
    folder: Path, case: Case, rank: int, groups: Mapping, is_critic: bool, bf16: bool = False
) -> NativeEngine:
    spec = ModelSpec(str(folder), sequence_parallel=case.sequence, optimizer=OptimizerConfig(**ADAM), bf16=bf16)
    spec.init_critic_from_actor, spec.zero_stage = is_critic, case.stage
    if case.recompute is not None:
        spec.gradient_checkpointing, spec.recompute_granularity = True, case.recompute
    return build_engine(
        read_hf_config(folder, is_critic), RoleSpec(spec, scalar_head=is_critic),
        ParallelContext(case.layout, rank, groups=groups), trained=True, holds_weights=True, seed=3, total_steps=10,
        stop_ids=(2,), tokenizer_folder=None,
    )  # fmt: skip


def groups_of(cases: Sequence[Case], rank: int) -> dict:
    layouts = [case.layout for case in cases]
    axes = dict.fromkeys(layout.axis(axis, rank) for layout in layouts for rank in layout.mesh.ranks for axis in AXES)
    return make_groups([ranks for ranks in axes if len(ranks) > 1], rank)


def job(rank: int, world: int, models: Sequence[str], root: Path) -> dict[tuple[str, str], Trained]:
    grad_reduction.BUCKET_NUMEL = 500
    groups = groups_of([*CASES.values()], rank)
    results = {}
    for model in models:
        for name, case in CASES.items():
            if rank in case.layout.mesh.ranks:
                is_critic = model.endswith("critic")
                engine = engine_of(root / model.removesuffix(" critic"), case, rank, groups, is_critic)
                results[model, name] = train(engine, is_critic)
                engine.save(root / f"{model} {name}")
            dist.barrier()
    return results


def train(engine: NativeEngine, is_critic: bool) -> Trained:
    """Train on the rows of this replica, of which the first has one and the others have several micro-batches."""
    strategy, coord = engine.context.layout.strategy, engine.context.coord
    mine = range(coord.dp, len(LENGTHS), strategy.dp)
    rows = batch_of(mine, "tokens")
    object.__setattr__(engine, "micro_batching", MicroBatching(max_tokens_per_mb=7 if coord.dp else 4096))
    stats = []
    for _ in range(STEPS):
        stats.append(engine.train(rows, regression if is_critic else likelihood, float(rows["tokens"].numel())))
    fn = (lambda outputs, _: outputs.values()) if is_critic else (lambda outputs, _: outputs.logprobs(TEMPERATURE))
    columns = engine.forward(rows, fn).split(rows.lengths("tokens"))
    return Trained(coord.dp, stats, dict(zip(mine, columns, strict=True)))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zero")


@pytest.fixture(scope="module")
def results(on_ranks: Callable[..., list[Any]], root: Path) -> dict[tuple[str, str], list[Trained]]:
    collected: dict[tuple[str, str], list[Trained]] = {}
    for name in MODELS:
        if not name.endswith("critic"):
            hf_model(name).save_pretrained(root / name)
    for some in (MODELS[:4], MODELS[4:]):
        for answer in on_ranks(4, job, some, root):
            for key, value in answer.items():
                collected.setdefault(key, []).append(value)
    return collected


def step_loss(members: list[Trained], step: int) -> float:
    """Return the loss of a step: the last stages of all replicas have a part."""
    parts = {member.dp: member.stats[step] for member in members if {"nll", "square"} & member.stats[step].keys()}
    return sum(next(stats[key][0] for key in ("nll", "square") if key in stats) for stats in parts.values())


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("model", MODELS)
def test_three_steps_equal_those_of_one_worker(model: str, case: str, results: dict, root: Path) -> None:
    (whole,), members = results[model, "whole"], results[model, case]
    assert len(members) == len(CASES[case].layout.mesh.ranks)
    for step in range(STEPS):
        assert step_loss(members, step) == pytest.approx(step_loss([whole], step), rel=2e-6)
        norm = whole.stats[step]["grad_norm"][0]
        assert all(member.stats[step]["grad_norm"][0] == pytest.approx(norm, rel=1e-5) for member in members)
        assert norm > ADAM["gradient_clipping"]
    expected, trained = (load_file(root / f"{model} {name}" / "model.safetensors") for name in ("whole", case))
    assert expected.keys() == trained.keys()
    for name, tensor in trained.items():
        assert torch.allclose(tensor, expected[name], atol=1e-6, rtol=0), (name, (tensor - expected[name]).abs().max())
    for member in members:
        for row, column in member.columns.items():
            assert torch.allclose(column, whole.columns[row], atol=2e-5)
