"""What the ranks of a layout do: the project's own engines and exchanges, on the recording backend."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from realhf.api.config import GenerationConfig, ModelSpec, OptimizerConfig
from realhf.api.execution_plan import MicroBatching
from realhf.api.experiment import RoleSpec
from realhf.api.layout import AXES, DeviceMesh, Layout, ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.api.param_box import box_numel, box_shape
from realhf.arch.param_specs import param_specs, stage_layers
from realhf.comm.exchange import P2PCopy, TensorSlice, exchange
from realhf.comm.p2p import make_directed_groups
from realhf.comm.process_groups import ParallelContext, make_groups
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import Loss, Outputs
from realhf.models.engine.native import NativeEngine, build_engine, empty_shard
from realhf.plan.compile.realloc import BoxCopy, plan_realloc
from tests.gpu_emulated.nccl.recording import Job
from tests.models.engine.tiny_engine import VOCAB, prompts_of, rows_of

CONFIG = ModelConfig("llama", 8, 16, 4, 2, 4, 24, VOCAB, 64, tied_embedding=True, init_std=0.2)
ROUTED = replace(CONFIG, n_experts=4, experts_per_token=2, expert_intermediate=8)
DEVICE = torch.device("cpu")


def layout_of(text: str, mesh: Sequence[int] = ()) -> Layout:
    strategy = ParallelStrategy.parse(text)
    return Layout(DeviceMesh(tuple(mesh) or tuple(range(strategy.dp * strategy.tp * strategy.pp))), strategy)


def context_of(layout: Layout, rank: int) -> ParallelContext:
    """Create the groups of a layout as a worker does. Collective over all ranks, of which the layout has some."""
    axes = dict.fromkeys(layout.axis(axis, member) for member in layout.mesh.ranks for axis in AXES)
    groups = make_groups([ranks for ranks in axes if len(ranks) > 1], rank, timeout_s=60.0)
    return ParallelContext(layout, rank, DEVICE, groups, directed=make_directed_groups(60.0))


def engine_of(
    layout: Layout, rank: int, trained: bool, config: ModelConfig = CONFIG, zero_stage: int = 1
) -> NativeEngine:
    spec = ModelSpec(init_from_scratch=True, optimizer=OptimizerConfig(lr=1e-3), overlap_grad_reduce=True,
                     tp_overlap=True, zero_stage=zero_stage)  # fmt: skip
    context = context_of(layout, rank)
    return build_engine(config, RoleSpec(spec), context, trained, True, 3, 10, (1,), None)


def rows(n: int) -> SequenceBatch:
    """Return rows for ``n`` micro-batches of different sizes."""
    return rows_of([1 + i % 3 for i in range(n)])


def loss(outputs: Outputs, batch: SequenceBatch) -> Loss:
    return Loss(-outputs.logprobs().sum(), {})


def train(layout: Layout, counts: Sequence[int], config: ModelConfig = CONFIG, zero_stage: int = 1) -> Job:
    """Make a training step per number of micro-batches: 1F1B, the sum of shared gradients, the sharded optimizer."""

    def job(rank: int, world: int) -> None:
        engine = engine_of(layout, rank, True, config, zero_stage)
        for n in counts:
            replace(engine, micro_batching=MicroBatching(n)).train(rows(n), loss, 2.0 * n)

    return job


def train_with_limit(layout: Layout) -> Job:
    """Make a step in which only the first replica has rows, and a mean is compared with its limit before it."""

    def job(rank: int, world: int) -> None:
        engine = engine_of(layout, rank, True)
        some = rows(4) if layout.coord(rank).dp == 0 else rows(4).select([])
        engine.train(some, loss, 8.0, {"nll": 1.0})

    return job


def infer(layout: Layout, counts: Sequence[int], config: ModelConfig = CONFIG) -> Job:
    def job(rank: int, world: int) -> None:
        engine = engine_of(layout, rank, False, config)
        for n in counts:
            replace(engine, micro_batching=MicroBatching(n)).forward(rows(n), lambda outputs, _: outputs.logprobs(1.0))

    return job


def generate(layout: Layout, counts: Sequence[int]) -> Job:
    """Generate with each number of slots, which are reused; fewer slots than stages give fewer groups of rows."""

    def job(rank: int, world: int) -> None:
        engine = engine_of(layout, rank, False)
        for n in counts:
            engine.generate(prompts_of((3, 1, 7, 4, 5)), GenerationConfig(max_new_tokens=4, max_num_seqs=n), 2, 5)

    return job


def reallocate(src: Layout, dst: Layout, in_place: bool) -> Job:
    """Move the parameters between two layouts; with ``in_place`` several receivers of an element relay it."""
    specs = param_specs(CONFIG)
    routes = plan_realloc(specs, partial(stage_layers, CONFIG), src, dst)
    copies = [
        P2PCopy(c, c.src, c.dst, TensorSlice(torch.float32, box_numel(c.box)), (c.name, c.box, route.dsts))
        for route in routes
        for c in route.copies()
    ]

    def job(rank: int, world: int) -> None:
        source, target = (
            empty_shard(CONFIG, layout, rank, torch.float32, DEVICE) if rank in layout.mesh.ranks else None
            for layout in (src, dst)
        )

        def into(copy: BoxCopy) -> Tensor:
            assert target is not None
            return target.read(copy.name, copy.box)

        def write(copy: BoxCopy, flat: Tensor) -> None:
            assert target is not None
            target.write(copy.name, copy.box, flat.view(box_shape(copy.box)))

        def read(copy: BoxCopy) -> Tensor:
            assert source is not None
            return source.read(copy.name, copy.box)

        exchange(copies, rank, read, write, DEVICE, into=into if in_place else None)

    return job


def transfer(copies: Sequence[P2PCopy]) -> Job:
    """Move rows between ranks."""

    def job(rank: int, world: int) -> None:
        lengths = {copy.what: copy.tensor_slice.numel for copy in copies}
        exchange(copies, rank, lambda what: torch.zeros(lengths[what], device=DEVICE), lambda what, flat: None, DEVICE)

    return job


def in_sequence(*jobs: Job) -> Job:
    """Run jobs one after the other on every rank, as calls that the master sends."""

    def job(rank: int, world: int) -> None:
        for one in jobs:
            one(rank, world)

    return job
