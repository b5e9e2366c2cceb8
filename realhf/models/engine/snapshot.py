"""What training changes in an engine, as tensors: taken for a checkpoint, put back under the same or another layout.

A checkpoint is a layout on disk. Of every model shard the first replica writes ``weights`` (and ``average``, the
float32 mean of a role that follows another in bfloat16); every replica writes its range of the optimizer: ``first``,
``second`` and, beside bfloat16 weights, ``master``. All of them are flat (models/flat_params.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.api.layout import Coord, Layout
from realhf.api.param_box import Box, intersect, relative
from realhf.arch.param_specs import param_specs, stage_layers
from realhf.models.engine.native import NativeEngine
from realhf.models.flat_params import FlatParams
from realhf.plan.compile.realloc import shard_boxes

Read = Callable[[int], Mapping[str, Tensor]]
"""The tensors that a worker of the saved layout wrote, by its rank."""
WEIGHTS, AVERAGE, STEPS = "weights", "average", "steps"


def snapshot(engine: NativeEngine) -> dict[str, Tensor]:
    """Return copies, in host memory, of what this worker has to remember of a role; nothing where others do."""
    found: dict[str, Tensor] = {}
    if engine.context.coord.dp == 0:
        found[WEIGHTS] = engine.params.data
        if engine.params.average is not None:
            found[AVERAGE] = engine.params.average
    if engine.optimizer is not None:
        found |= engine.optimizer.state
        found[STEPS] = torch.tensor([engine.optimizer.steps])
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in found.items()}


@torch.no_grad()
def restore(engine: NativeEngine, saved: Layout, read: Read) -> None:
    """Put back what ``snapshot`` took on the workers of ``saved``; bit for bit where the layout is the same."""
    whole = _WholeModel.of(engine, saved, read)
    engine.params.data.copy_(whole.flats[WEIGHTS])
    if AVERAGE in whole.flats:
        engine.params.average = whole.flats[AVERAGE].to(engine.params.data.device)
    if engine.optimizer is None:
        return
    for name, tensor in engine.optimizer.state.items():
        tensor.copy_(whole.flats[name][engine.optimizer.start : engine.optimizer.stop])
    engine.optimizer.steps = whole.steps


@dataclass
class _WholeModel:
    """A shard's weights, moments and averages in full, as if it had one replica."""

    flats: dict[str, Tensor]
    steps: int

    @staticmethod
    def of(engine: NativeEngine, saved: Layout, read: Read) -> "_WholeModel":
        """Put this worker's shard together from the saved ones."""
        params, layout, coord = engine.params, engine.context.layout, engine.context.coord
        if _cut_alike(saved, layout):  # the flat tensors are the same but for their padding
            found = _read_shard(saved, coord.pp, coord.tp, read)
            steps = int(found.pop(STEPS, torch.zeros(1)))
            return _WholeModel({name: _fitted(flat, params.data.numel()) for name, flat in found.items()}, steps)
        specs = param_specs(engine.config)
        flats: dict[str, Tensor] = {}
        steps = 0
        for pp in range(saved.strategy.pp):
            for tp in range(saved.strategy.tp):
                boxes = shard_boxes(
                    specs, lambda n: stage_layers(engine.config, n), saved, saved.rank(Coord(pp, 0, tp))
                )
                common = {name: both for name in set(boxes) & set(params.names)
                          if (both := intersect(boxes[name], params.box(name)))}  # fmt: skip
                if not common:
                    continue
                shell = FlatParams([s for s in specs if s.name in boxes], boxes, params.data.dtype, "meta")
                found = _read_shard(saved, pp, tp, read)
                steps = int(found.pop(STEPS, torch.zeros(1)))
                for name, flat in found.items():
                    mine = flats.setdefault(name, torch.zeros(params.data.numel(), dtype=flat.dtype))
                    _copy_boxes(common, shell, flat, params, mine)
        return _WholeModel(flats, steps)


def _cut_alike(one: Layout, other: Layout) -> bool:
    return (one.strategy.tp, one.strategy.pp) == (other.strategy.tp, other.strategy.pp)


def _fitted(flat: Tensor, numel: int) -> Tensor:
    """Return a flat tensor with the padding of another number of replicas."""
    if len(flat) >= numel:
        return flat[:numel]
    return torch.cat([flat, flat.new_zeros(numel - len(flat))])


def _read_shard(saved: Layout, pp: int, tp: int, read: Read) -> dict[str, Tensor]:
    """Return the flat tensors of a saved model shard; ranges of the optimizer are put end to end."""
    replicas = sorted(saved.rank(Coord(pp, dp, tp)) for dp in range(saved.strategy.dp))  # ranges go by rank
    parts = {rank: read(rank) for rank in replicas}
    first = parts[saved.rank(Coord(pp, 0, tp))]
    found = {name: first[name] for name in (WEIGHTS, AVERAGE, STEPS) if name in first}
    ranged = [name for name in first if name not in found]
    return found | {name: torch.cat([parts[rank][name] for rank in replicas]) for name in ranged}


def _copy_boxes(common: Mapping[str, Box], shell: FlatParams, flat: Tensor, params: FlatParams, mine: Tensor) -> None:
    """Copy what two shards have in common from one flat tensor to another."""
    for name, both in common.items():
        source = _view(flat, shell, name)[relative(both, shell.box(name))]
        _view(mine, params, name)[relative(both, params.box(name))] = source


def _view(flat: Tensor, params: FlatParams, name: str) -> Tensor:
    span = params.span(name)
    return flat[span.start : span.stop].view([stop - start for start, stop in params.box(name)])
