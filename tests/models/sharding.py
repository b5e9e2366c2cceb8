"""Runs models in several layouts on gloo ranks and returns results as plain values. Does not import transformers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import GenerationConfig, LoraOptions, LRSchedule, ModelSpec, OptimizerConfig
from realhf.api.config.choices import Recompute
from realhf.api.experiment import RoleSpec
from realhf.api.layout import AXES, DeviceMesh, Layout, ParallelStrategy
from realhf.api.messages import Stats
from realhf.api.model_config import Lora, ModelConfig
from realhf.arch.hf_config import read_hf_config
from realhf.comm.process_groups import Group, ParallelContext, make_groups
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import Loss
from realhf.models.engine import grad_reduction
from realhf.models.engine.native import NativeEngine, build_engine
from realhf.models.engine.packing import ForwardOutputs

LENGTHS = (9, 3, 6, 1, 9, 5)  # windows are 4; a row of one token leaves ranks without tokens under sequence parallelism
TEMPERATURE = 0.7
RANK, ALPHA = 4, 6.0  # of LoRA adapters
GROUP_SIZE = 4  # of weights below them with a scale
BALANCING_RATE = 0.01
# a large epsilon makes the step smooth in the gradient
STEP = {"lr": 0.1, "eps": 1.0, "gradient_clipping": 1.0, "lr_scheduler_type": LRSchedule.constant}


@dataclass(frozen=True)
class ShardedLayout:
    """A layout; in training with or without sequence parallelism, and communication overlapped with backward passes."""

    layout: Layout
    sequence: bool = True
    overlap: bool = False
    recompute: Recompute | None = None
    zero_stage: int = 1


def _sharded(mesh: tuple[int, ...], text: str, sequence: bool = True, overlap: bool = False) -> ShardedLayout:
    return ShardedLayout(Layout(DeviceMesh(mesh), ParallelStrategy.parse(text)), sequence, overlap)


N_SAMPLES = 3
"""Of a prompt in generation."""
LAYOUTS: Mapping[str, ShardedLayout] = {
    "whole": _sharded((0,), "d1t1p1"),
    "t2": _sharded((0, 1), "t2"),
    "t2 without sequence": _sharded((2, 3), "t2", sequence=False),
    "p2": _sharded((3, 1), "p2"),
    "t2p2": _sharded((1, 0, 2, 3), "t2p2"),
    "t2p2 without sequence": _sharded((1, 0, 3, 2), "t2p2", sequence=False, overlap=True),
    "t4": _sharded((0, 1, 2, 3), "t4"),
    "t4 without sequence": _sharded((0, 1, 2, 3), "t4", sequence=False),
    "d2t2": _sharded((0, 1, 2, 3), "d2t2"),
    "d2t2 overlapped": _sharded((1, 0, 3, 2), "d2t2", overlap=True),
    "d2t2p2": _sharded((1, 0, 2, 3, 6, 5, 4, 7), "d2t2p2", overlap=True),
}
CONTEXT_LAYOUTS: Mapping[str, ShardedLayout] = {
    "c2": _sharded((1, 0), "c2"),
    "c4": _sharded((0, 1, 2, 3), "c4", overlap=True),
    "d2c2": _sharded((1, 0, 2, 3), "d2c2"),
    "d2c2 overlapped": _sharded((0, 1, 2, 3), "d2c2", overlap=True),
    "c2p2": _sharded((2, 1, 0, 3), "c2p2"),
    "c2p2 overlapped": _sharded((0, 1, 2, 3), "c2p2", overlap=True),
}
EXPERT_LAYOUTS: Mapping[str, ShardedLayout] = {
    "t2e2": _sharded((1, 2), "t2e2"),
    "t2e2 without sequence": _sharded((1, 0), "t2e2", sequence=False),
    "t4e2": _sharded((0, 1, 2, 3), "t4e2"),
    "d2e2": _sharded((0, 1), "d2e2"),
    "d4e2": _sharded((1, 0, 3, 2), "d4e2", overlap=True),
    "d2t2e2": _sharded((0, 1, 2, 3), "d2t2e2"),
    "d2t2e4": _sharded((3, 1, 0, 2), "d2t2e4", overlap=True),
    "d2t2e4 without sequence": _sharded((0, 1, 2, 3), "d2t2e4", sequence=False),
    "d2p2e2": _sharded((2, 1, 0, 3), "d2p2e2"),
}
INTERLEAVED_LAYOUTS: Mapping[str, ShardedLayout] = {
    "p2v2": _sharded((3, 1), "p2v2"),
    "p2v2 recomputed": replace(_sharded((0, 1), "p2v2"), recompute=Recompute.full),
    "t2p2v2": _sharded((1, 0, 2, 3), "t2p2v2"),
    "t2p2v2 without sequence": _sharded((1, 0, 3, 2), "t2p2v2", sequence=False, overlap=True),
    "d2p2v2": _sharded((2, 1, 0, 3), "d2p2v2", overlap=True),
    "d2p2v2 with ZeRO-2": replace(_sharded((0, 1, 2, 3), "d2p2v2"), zero_stage=2),
    "d2p2v2 with ZeRO-3": replace(_sharded((3, 1, 2, 0), "d2p2v2z3"), zero_stage=3, recompute=Recompute.selective),
}


@dataclass(frozen=True)
class InitialModel:
    """The initial weights of a model, and its LoRA adapters; a missing scalar head of a critic is initialised.

    ``bits`` are those of the weights below the adapters, 0 for float32.
    """

    folder: Path
    is_critic: bool = False
    adapter: Path | None = None
    bits: int = 0


@dataclass(frozen=True)
class WorkerResult:
    """The results of a worker of data-parallel rank ``dp``: columns by row, responses by id, and step statistics."""

    dp: int
    columns: dict[str, dict[int, Tensor]]
    sampled: dict[tuple[int, int], Tensor]
    sampled_logprobs: dict[tuple[int, int], Tensor]
    stats: Stats
    shares_prompts: bool
    sampled_experts: dict[tuple[int, int], Tensor] | None = None


def job(
    rank: int, world: int, models: Mapping[str, InitialModel], names: Mapping[str, Sequence[str]], root: Path
) -> dict[tuple[str, str], WorkerResult]:
    """Run each model in its layouts, one after the other; each layout loads what the previous one saved."""
    grad_reduction.BUCKET_NUMEL = 500
    every = LAYOUTS | EXPERT_LAYOUTS | CONTEXT_LAYOUTS | INTERLEAVED_LAYOUTS
    layouts = [every[name].layout for model in models for name in names[model]]
    axes = dict.fromkeys(layout.axis(axis, rank) for layout in layouts for rank in layout.mesh.ranks for axis in AXES)
    groups = make_groups([ranks for ranks in axes if len(ranks) > 1], rank)
    results = {}
    for model, initial in models.items():
        for name in names[model]:
            where = root / model / name
            if rank in every[name].layout.mesh.ranks:
                engine = engine_on(initial, every[name], rank, groups)
                engine.save(where / "saved")
                results[model, name] = run(engine)
                engine.save(where / "trained")
            dist.barrier()
            initial = replace(initial, **{"adapter" if initial.adapter else "folder": where / "saved"})
    return results


Results = dict[tuple[str, str], list[WorkerResult]]
"""By model and layout: the results of its workers."""


def collect(
    on_ranks: Callable[..., list[Any]], world: int, models: Mapping[str, InitialModel],
    names: Mapping[str, Sequence[str]], root: Path, results: Results,
) -> None:  # fmt: skip
    """Run ``job`` on ``world`` ranks, and add to ``results``."""
    for answer in on_ranks(world, job, models, names, root):
        for key, value in answer.items():
            results.setdefault(key, []).append(value)


def engine_on(
    initial: InitialModel, sharded: ShardedLayout, rank: int, groups: Mapping[tuple[int, ...], Group]
) -> NativeEngine:
    spec = ModelSpec(str(initial.folder), sequence_parallel=sharded.sequence, optimizer=OptimizerConfig(**STEP))
    spec.init_critic_from_actor, spec.router_bias_update_rate = initial.is_critic, BALANCING_RATE
    spec.overlap_grad_reduce = spec.tp_overlap = sharded.overlap
    spec.zero_stage = sharded.zero_stage
    if sharded.recompute is not None:
        spec.gradient_checkpointing, spec.recompute_granularity = True, sharded.recompute
    config = read_hf_config(initial.folder, initial.is_critic)
    if initial.adapter:
        spec.lora = LoraOptions(RANK, ALPHA, init_from=str(initial.adapter))
        dropout = 0.0 if config.n_experts else 0.2
        config = replace(config, lora=Lora(RANK, ALPHA, (), initial.bits, GROUP_SIZE, dropout))
    return build_engine(
        replace(config, z_loss=0.05 if config.n_experts else 0.0),
        RoleSpec(spec, scalar_head=initial.is_critic),
        ParallelContext(sharded.layout, rank, groups=groups),
        trained=True,
        holds_weights=True,
        seed=3,
        total_steps=10,
        stop_ids=(2,),
        tokenizer_folder=None,
    )


def run(engine: NativeEngine) -> WorkerResult:
    """Run forward, generation and one training step on the rows of this worker's replica."""
    strategy, coord = engine.context.layout.strategy, engine.context.coord
    mine = range(coord.dp, len(LENGTHS), strategy.dp)
    rows, prompts = with_some_experts(batch_of(mine, "tokens"), engine.config), batch_of(mine, "prompts")
    is_critic = engine.config.head == "scalar"
    columns = {
        name: dict(zip(mine, engine.forward(rows.only(keys), fn).split(rows.lengths("tokens")), strict=True))
        for name, (keys, fn) in (CRITIC if is_critic else ACTOR).items()
        if set(keys) <= rows.columns.keys()
    }
    sampled: dict[str, dict[tuple[int, int], Tensor]] = {"tokens": {}, "logprobs": {}}
    if not is_critic and strategy.expert_dp == strategy.vpp == 1 and not strategy.context:
        is_routed = bool(engine.config.n_experts)
        responses = engine.generate(
            prompts, GenerationConfig(max_new_tokens=4), N_SAMPLES, seed=5, record_experts=is_routed
        )
        sampled |= {"routed_experts": {}} if is_routed else {}
        ids = [(row.prompt, row.sample) for row in responses.ids]
        sampled = {key: dict(zip(ids, responses.columns[key].rows(), strict=True)) for key in sampled}
    shares = engine.model.supports_shared_prefixes
    stats = engine.train(rows, regression if is_critic else likelihood, float(rows["tokens"].numel()))
    return WorkerResult(
        coord.dp, columns, sampled["tokens"], sampled["logprobs"], stats, shares, sampled.get("routed_experts")
    )


def with_some_experts(batch: SequenceBatch, config: ModelConfig) -> SequenceBatch:
    """Give every second token experts that depend on its row and position; the others are routed."""
    if not config.n_experts:
        return batch
    rows = []
    for row_id, length in zip(batch.ids, batch.lengths("tokens"), strict=True):
        shape = length, len(config.routed_layers), config.n_experts
        numbers = torch.rand(shape, generator=torch.Generator().manual_seed(row_id.prompt))
        experts = numbers.argsort(-1)[..., : config.experts_per_token]
        experts[::2] = config.n_experts
        rows.append(experts.to(torch.uint8).flatten())
    return batch.with_columns(routed_experts=Column.of(rows))


def batch_of(numbers: range, column: str) -> SequenceBatch:
    """Return rows by number; their tokens depend only on the number."""
    rows = []
    for number in numbers:
        generator = torch.Generator().manual_seed(100 + number)
        rows.append(torch.randint(3, 67, (LENGTHS[number],), generator=generator))
    return SequenceBatch(tuple(RowId(n, PROMPT) for n in numbers), {column: Column.of(rows)})


def projected_logits(outputs: ForwardOutputs, batch: SequenceBatch) -> Tensor:
    """Return a projection of the logits, one number per token."""
    hidden = outputs.model.token_region(len(outputs.packing.tokens)).gather_from_sp(outputs.states.all())
    logits = outputs.model.logits(hidden)
    return logits @ torch.arange(logits.shape[1]).float().cos()


def masked_logprobs(outputs: ForwardOutputs, batch: SequenceBatch) -> Tensor:
    """Return the log-probabilities of some tokens; some rows have none."""
    return outputs.logprobs(TEMPERATURE, batch["tokens"] % 4 == 0)


def likelihood(outputs: ForwardOutputs, batch: SequenceBatch) -> Loss:
    total = -(outputs.logprobs(TEMPERATURE) + masked_logprobs(outputs, batch)).sum()
    return Loss(total, {"nll": (total.detach(), 1.0)})


def regression(outputs: ForwardOutputs, batch: SequenceBatch) -> Loss:
    """Squared error to targets that depend on the token."""
    total = (outputs.values() - batch["tokens"].float().sin()).square().sum()
    return Loss(total, {"square": (total.detach(), 1.0)})


ACTOR = {
    "logprobs": (("tokens",), lambda outputs, _: outputs.logprobs(TEMPERATURE)),
    "logits": (("tokens",), projected_logits),
    "masked": (("tokens",), masked_logprobs),
    "replayed": (("tokens", "routed_experts"), lambda outputs, _: outputs.logprobs(TEMPERATURE)),
}
CRITIC = {"values": (("tokens",), lambda outputs, _: outputs.values())}
