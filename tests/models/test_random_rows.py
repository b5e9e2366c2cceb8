"""Random rows, also of one token and on replicas without any, in layouts that divide experts, rows or stages."""

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import ModelSpec, OptimizerConfig
from realhf.api.config.choices import Recompute
from realhf.api.execution_plan import MicroBatching
from realhf.api.experiment import RoleSpec
from realhf.api.layout import AXES, DeviceMesh, Layout, ParallelStrategy
from realhf.arch.hf_config import read_hf_config
from realhf.comm.process_groups import Group, ParallelContext, make_groups
from realhf.data.batch import Column, SequenceBatch
from realhf.models.engine.native import NativeEngine, build_engine
from tests.models.sharding import likelihood
from tests.models.tiny_models import hf_model
from tests.scaling import examples

pytestmark = [pytest.mark.dist, pytest.mark.slow]
LAYOUTS = ("d4e4", "d2t2e4", "d4e2", "t4e4", "d2p2e2", "c4", "d2c2", "c2p2", "d2p2v2", "d2p2v2e2")
RECOMPUTED = (None, Recompute.selective, Recompute.full)


def rows_of(seed: int) -> list[torch.Tensor]:
    """Return up to five rows of up to 40 tokens, of which most are short."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    lengths = [random.choice((1, 1, 2, 3, random.randint(1, 40))) for _ in range(random.randint(1, 5))]
    return [torch.randint(3, 67, (length,), generator=generator) for length in lengths]


def engine_on(folder: Path, layout: Layout, rank: int, groups: dict, recompute: Recompute | None) -> NativeEngine:
    spec = ModelSpec(str(folder), optimizer=OptimizerConfig(lr=0.0, weight_decay=0.0))
    spec.gradient_checkpointing, spec.recompute_granularity = recompute is not None, recompute or Recompute.full
    context = ParallelContext(layout, rank, groups=groups)
    config, role = read_hf_config(folder, False), RoleSpec(spec)
    return build_engine(config, role, context, trained=True, holds_weights=True, seed=1, total_steps=10, stop_ids=(2,),
                        tokenizer_folder=None)  # fmt: skip


def results_of(engine: NativeEngine, rows: Sequence[torch.Tensor], limit: int) -> tuple[float, float, float, list]:
    """Return (sum of losses, router loss, gradient norm, log-probabilities by row) of this replica's rows."""
    layout, coord = engine.context.layout, engine.context.coord
    mine = range(coord.dp, len(rows), layout.strategy.dp)
    ids = tuple(RowId(number, PROMPT) for number in mine)
    tokens = torch.cat([torch.empty(0, dtype=torch.int64), *(rows[number] for number in mine)])
    batch = SequenceBatch(ids, {"tokens": Column(tokens, tuple(len(rows[number]) for number in mine))})
    object.__setattr__(engine, "micro_batching", MicroBatching(max_tokens_per_mb=limit))
    found = engine.forward(batch, lambda outputs, _: outputs.logprobs(1.0)).split(batch.lengths("tokens"))
    count = float(sum(len(rows[n]) for n in mine))
    stats = engine.train(batch, likelihood, count)
    loss = stats.get("nll", (0.0, 0.0))[0] if engine.pipeline.is_last and coord.tp == 0 else 0.0
    router = stats["router_balance_loss"][0] if coord.pp == coord.tp == 0 else 0.0
    sums = torch.tensor([loss, router], dtype=torch.float64)
    torch.distributed.all_reduce(sums)
    return (*sums.tolist(), stats["grad_norm"][0], [(n, row.tolist()) for n, row in zip(mine, found, strict=True)])


def job(rank: int, world: int, folder: Path, seeds: int) -> list[str]:
    """Return the differences from one worker, which every rank computes alone."""
    meshes = {name: Layout(DeviceMesh(tuple(range(world))), ParallelStrategy.parse(name)) for name in LAYOUTS}
    axes = dict.fromkeys(layout.axis(axis, r) for layout in meshes.values() for r in range(world) for axis in AXES)
    groups = make_groups([ranks for ranks in axes if len(ranks) > 1], rank)
    alone = engine_on(folder, Layout(DeviceMesh((rank,)), ParallelStrategy()), rank, {}, None)
    assert all(isinstance(group, Group) for group in groups.values())
    wrong = []
    for number, (name, layout) in enumerate(meshes.items()):
        engine = engine_on(folder, layout, rank, groups, RECOMPUTED[number % len(RECOMPUTED)])
        for seed in range(seeds):
            rows, limit = rows_of(seed), (7, 4096)[seed % 2]
            loss, router, norm, columns = results_of(engine, rows, limit)
            whole_loss, whole_router, whole_norm, expected = results_of(alone, rows, 4096)
            pairs = ((loss, whole_loss / world), (router, whole_router / world), (norm, whole_norm))
            far = [pair for pair in pairs if abs(pair[0] - pair[1]) > 1e-5 * (1 + abs(pair[1]))]
            known = dict(expected)
            far += [(n, "row") for n, row in columns
                    if not torch.allclose(torch.tensor(row), torch.tensor(known[n]), atol=1e-4)]  # fmt: skip
            wrong += [f"{name}, seed {seed}, rank {rank}: {far}"] if far else []
    return wrong


@pytest.mark.parametrize("model", ["deep qwen3_moe", "deep deepseek_v3"])
def test_results_are_those_of_one_worker(model: str, on_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    hf_model(model).save_pretrained(tmp_path)
    found = on_ranks(4, job, tmp_path, examples(3))
    assert [line for answer in found for line in answer] == []
