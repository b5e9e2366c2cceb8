"""What one worker does with a model in every layout, as plain values. Gloo ranks import this: no transformers here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import GenerationConfig, LRSchedule, ModelSpec, OptimizerConfig
from realhf.api.experiment import RoleSpec
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.messages import Stats
from realhf.arch.hf_config import read_hf_config
from realhf.comm.process_groups import Group, ParallelContext, make_groups
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import Loss
from realhf.models.engine.native import NativeEngine, build_engine
from realhf.models.engine.outputs import ForwardOutputs

LENGTHS = (9, 3, 6, 1, 9, 5)  # windows are 4; of one token a tensor-parallel group has an empty share
TEMPERATURE = 0.7
# a large epsilon makes the step smooth in the gradient
STEP = {"lr": 0.1, "eps": 1.0, "gradient_clipping": 1.0, "lr_scheduler_type": LRSchedule.constant}


@dataclass(frozen=True)
class Cut:
    """A layout on some workers, and whether tokens are shared out in training."""

    layout: Layout
    sequence: bool = True


def _cut(mesh: tuple[int, ...], text: str, sequence: bool = True) -> Cut:
    return Cut(Layout(DeviceMesh(mesh), ParallelStrategy.parse(text)), sequence)


AXES = ("dp", "tp", "pp")
CUTS: Mapping[str, Cut] = {
    "whole": _cut((0,), "d1t1p1"),
    "t2": _cut((0, 1), "t2"),
    "t2 without sequence": _cut((2, 3), "t2", sequence=False),
    "p2": _cut((3, 1), "p2"),
    "t2p2": _cut((1, 0, 2, 3), "t2p2"),
    "t2p2 without sequence": _cut((1, 0, 3, 2), "t2p2", sequence=False),
    "t4": _cut((0, 1, 2, 3), "t4"),
    "t4 without sequence": _cut((0, 1, 2, 3), "t4", sequence=False),
    "d2t2": _cut((0, 1, 2, 3), "d2t2"),
    "d2t2p2": _cut((1, 0, 2, 3, 6, 5, 4, 7), "d2t2p2"),
}


@dataclass(frozen=True)
class Start:
    """The weights of a model; a critic's scalar head is drawn where they have none."""

    folder: Path
    is_critic: bool = False


@dataclass(frozen=True)
class Told:
    """What a member of data-parallel rank ``dp`` computed: by column and row, by answer, and for the step."""

    dp: int
    columns: dict[str, dict[int, Tensor]]
    drawn: dict[tuple[int, int], Tensor]
    drawn_logprobs: dict[tuple[int, int], Tensor]
    stats: Stats


def job(
    rank: int, world: int, starts: Mapping[str, Start], names: Sequence[str], root: Path
) -> dict[tuple[str, str], Told]:
    """Take each model through the layouts, one after the other; what one saves is loaded in the next."""
    layouts = [CUTS[name].layout for name in names]
    axes = dict.fromkeys(layout.axis(axis, rank) for layout in layouts for rank in layout.mesh.ranks for axis in AXES)
    groups = make_groups([ranks for ranks in axes if len(ranks) > 1], rank)
    told = {}
    for model, start in starts.items():
        for name in names:
            where = root / model / name
            if rank in CUTS[name].layout.mesh.ranks:
                engine = engine_on(start, CUTS[name], rank, groups)
                engine.save(where / "saved")
                told[model, name] = run(engine)
                engine.save(where / "trained")
            dist.barrier()
            start = replace(start, folder=where / "saved")
    return told


def engine_on(start: Start, cut: Cut, rank: int, groups: Mapping[tuple[int, ...], Group]) -> NativeEngine:
    spec = ModelSpec(str(start.folder), sequence_parallel=cut.sequence, optimizer=OptimizerConfig(**STEP))
    spec.init_critic_from_actor = start.is_critic
    config = read_hf_config(start.folder, start.is_critic)
    return build_engine(
        replace(config, z_loss=0.05 if config.n_experts else 0.0),
        RoleSpec(spec, scalar_head=start.is_critic),
        ParallelContext(cut.layout, rank, groups=groups),
        trained=True,
        holds_weights=True,
        seed=3,
        total_steps=10,
        stop_ids=(2,),
        tokenizer_folder=None,
    )


def run(engine: NativeEngine) -> Told:
    """Forward, generation and one step, on the rows of this worker's replica."""
    strategy, at = engine.context.layout.strategy, engine.context.coord
    mine = range(at.dp, len(LENGTHS), strategy.dp)
    rows, prompts = batch_of(mine, "tokens"), batch_of(mine, "prompts")
    is_critic = engine.config.head == "scalar"
    columns = {
        name: dict(zip(mine, engine.forward(rows, fn).split(rows.lengths("tokens")), strict=True))
        for name, fn in (CRITIC if is_critic else ACTOR).items()
    }
    drawn: dict[str, dict[tuple[int, int], Tensor]] = {"tokens": {}, "logprobs": {}}
    if not is_critic:
        answers = engine.generate(prompts, GenerationConfig(max_new_tokens=4), 1, seed=5)
        ids = [(row.prompt, row.sample) for row in answers.ids]
        drawn = {key: dict(zip(ids, answers.columns[key].rows(), strict=True)) for key in drawn}
    stats = engine.train(rows, regression if is_critic else likelihood, float(rows["tokens"].numel()))
    return Told(at.dp, columns, drawn["tokens"], drawn["logprobs"], stats)


def batch_of(numbers: range, column: str) -> SequenceBatch:
    """Rows by number, wherever they are."""
    rows = []
    for number in numbers:
        generator = torch.Generator().manual_seed(100 + number)
        rows.append(torch.randint(3, 67, (LENGTHS[number],), generator=generator))
    return SequenceBatch(tuple(RowId(n, PROMPT) for n in numbers), {column: Column.of(rows)})


def projected_logits(outputs: ForwardOutputs, batch: SequenceBatch) -> Tensor:
    """One number per token, in which every logit counts."""
    logits = outputs.model.logits(outputs.hidden)
    return logits @ torch.arange(logits.shape[1]).float().cos()


def likelihood(outputs: ForwardOutputs, batch: SequenceBatch) -> Loss:
    total = -outputs.logprobs(TEMPERATURE).sum()
    return Loss(total, {"nll": (total.detach(), 1.0)})


def regression(outputs: ForwardOutputs, batch: SequenceBatch) -> Loss:
    """Towards targets that differ from token to token."""
    total = (outputs.values() - batch["tokens"].float().sin()).square().sum()
    return Loss(total, {"square": (total.detach(), 1.0)})


ACTOR = {"logprobs": lambda outputs, _: outputs.logprobs(TEMPERATURE), "logits": projected_logits}
CRITIC = {"values": lambda outputs, _: outputs.values()}
