"""What one worker does with a model in every layout, as plain values. Gloo ranks import this: no transformers here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.api.batch import PROMPT, RowId
from realhf.api.config import GenerationConfig, ModelSpec, OptimizerConfig, Schedule
from realhf.api.engine import Loss
from realhf.api.experiment import RoleSpec
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.comm.parallel import Group, ParallelContext, make_groups
from realhf.data.batch import Column, SequenceBatch
from realhf.engine.native import NativeEngine, build_engine
from realhf.engine.outputs import ForwardOutputs
from realhf.models.specs import read_hf_config

LENGTHS = (9, 3, 6, 1, 9, 5)  # windows are 4
TEMPERATURE = 0.7
# a large epsilon makes the step smooth in the gradient
STEP = {"lr": 0.1, "eps": 1.0, "gradient_clipping": 1.0, "lr_scheduler_type": Schedule.constant}


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
}


@dataclass(frozen=True)
class Told:
    """What a layout computed: by row (keyed by its number) and for the step as a whole."""

    logprobs: dict[int, Tensor]
    logits: dict[int, Tensor]
    drawn: dict[tuple[int, int], Tensor]
    drawn_logprobs: dict[tuple[int, int], Tensor]
    grad_norm: float


def job(rank: int, world: int, folders: Mapping[str, Path], root: Path) -> dict[tuple[str, str], Told]:
    """Take each model through all layouts, one after the other; what one saves is loaded in the next."""
    axes = dict.fromkeys(
        cut.layout.axis(axis, member) for cut in CUTS.values() for member in cut.layout.mesh.ranks for axis in AXES
    )
    groups = make_groups([ranks for ranks in axes if len(ranks) > 1], rank)
    told = {}
    for model, folder in folders.items():
        saved = folder
        for name, cut in CUTS.items():
            where = root / model / name
            if rank in cut.layout.mesh.ranks:
                engine = engine_on(saved, cut, rank, groups)
                engine.save(where / "saved")
                told[model, name] = run(engine)
                engine.save(where / "trained")
            dist.barrier()
            saved = where / "saved"
    return told


def engine_on(folder: Path, cut: Cut, rank: int, groups: Mapping[tuple[int, ...], Group]) -> NativeEngine:
    spec = ModelSpec(str(folder), sequence_parallel=cut.sequence, optimizer=OptimizerConfig(**STEP))
    config = read_hf_config(folder, False)
    return build_engine(
        replace(config, z_loss=0.05 if config.n_experts else 0.0),
        RoleSpec(spec),
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
    logprobs = engine.forward(rows, lambda outputs, _: outputs.logprobs(TEMPERATURE))
    logits = engine.forward(rows, projected_logits)
    drawn = engine.generate(prompts, GenerationConfig(max_new_tokens=4), 1, seed=5)
    count = float(rows["tokens"].numel() - len(rows))
    stats = engine.train(rows, likelihood, count)

    def split(packed: Tensor) -> dict[int, Tensor]:
        return dict(zip(mine, packed.split(rows.lengths("tokens")), strict=True))

    def answers(key: str) -> dict[tuple[int, int], Tensor]:
        return dict(zip([(i.prompt, i.sample) for i in drawn.ids], drawn.columns[key].rows(), strict=True))

    return Told(split(logprobs), split(logits), answers("tokens"), answers("logprobs"), stats["grad_norm"][0])


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
