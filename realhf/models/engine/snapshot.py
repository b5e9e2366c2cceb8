"""The trained state of an engine as tensors: saved for a checkpoint, restored under the same or another layout.

A checkpoint is a layout on disk. For every model shard the first replica writes ``weights`` (and ``average``, the
float32 moving average of bfloat16 weights); every replica writes its range of the optimizer state: ``first``,
``second`` and, for bfloat16 weights, ``master``. All of them are flat (models/flat_params.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.api.layout import Coord, Layout
from realhf.api.param_box import Box, intersect, relative
from realhf.models.engine.native import NativeEngine, empty_shard
from realhf.models.flat_params import FlatParams

Read = Callable[[int], Mapping[str, Tensor]]
"""Returns the tensors that a rank of the saved layout wrote."""
WEIGHTS, AVERAGE, STEPS = "weights", "average", "steps"


def snapshot(engine: NativeEngine) -> dict[str, Tensor]:
    """Return copies in host memory of the tensors that this worker saves; none if other workers save all of them."""
    state: dict[str, Tensor] = {}
    if engine.context.coord.dp == 0:
        state[WEIGHTS] = engine.params.data
        if engine.params.average is not None:
            state[AVERAGE] = engine.params.average
    if engine.optimizer is not None:
        state |= engine.optimizer.state
        state[STEPS] = torch.tensor([engine.optimizer.steps])
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}


@torch.no_grad()
def restore(engine: NativeEngine, saved: Layout, read: Read) -> None:
    """Restore the snapshots of the workers of ``saved``; bit for bit if the layout is the same."""
    merged = _MergedShard.of(engine, saved, read)
    engine.params.data.copy_(merged.flats[WEIGHTS])
    if AVERAGE in merged.flats:
        engine.params.average = merged.flats[AVERAGE].to(engine.params.data.device)
    if engine.optimizer is None:
        return
    for name, tensor in engine.optimizer.state.items():
        tensor.copy_(merged.flats[name][engine.optimizer.start : engine.optimizer.stop])
    engine.optimizer.steps = merged.steps


@dataclass
class _MergedShard:
    """The weights, moments and averages of a shard, merged over replicas."""

    flats: dict[str, Tensor]
    steps: int

    @staticmethod
    def of(engine: NativeEngine, saved: Layout, read: Read) -> "_MergedShard":
        """Assemble this worker's shard from the saved ones."""
        params, layout, coord = engine.params, engine.context.layout, engine.context.coord
        if _same_sharding(saved, layout):  # the flat tensors differ only in padding
            state = _read_shard(saved, coord.pp, coord.tp, read)
            steps = int(state.pop(STEPS, torch.zeros(1)))
            return _MergedShard({name: _resized(flat, params.data.numel()) for name, flat in state.items()}, steps)
        flats: dict[str, Tensor] = {}
        steps = 0
        for pp in range(saved.strategy.pp):
            for tp in range(saved.strategy.tp):
                shard = empty_shard(engine.config, saved, saved.rank(Coord(pp, 0, tp)), params.data.dtype, "meta")
                common = {name: both for name in set(shard.names) & set(params.names)
                          if (both := intersect(shard.box(name), params.box(name)))}  # fmt: skip
                if not common:
                    continue
                state = _read_shard(saved, pp, tp, read)
                steps = int(state.pop(STEPS, torch.zeros(1)))
                for name, flat in state.items():
                    target = flats.setdefault(name, torch.zeros(params.data.numel(), dtype=flat.dtype))
                    _copy_boxes(common, shard, flat, params, target)
        return _MergedShard(flats, steps)


def _same_sharding(one: Layout, other: Layout) -> bool:
    return (one.strategy.tp, one.strategy.pp) == (other.strategy.tp, other.strategy.pp)


def _resized(flat: Tensor, numel: int) -> Tensor:
    """Return a flat tensor padded for another number of replicas."""
    if len(flat) >= numel:
        return flat[:numel]
    return torch.cat([flat, flat.new_zeros(numel - len(flat))])


def _read_shard(saved: Layout, pp: int, tp: int, read: Read) -> dict[str, Tensor]:
    """Return the flat tensors of a saved model shard; the ranges of the optimizer are concatenated."""
    replicas = sorted(saved.rank(Coord(pp, dp, tp)) for dp in range(saved.strategy.dp))  # ranges are ordered by rank
    parts = {rank: read(rank) for rank in replicas}
    first = parts[saved.rank(Coord(pp, 0, tp))]
    state = {name: first[name] for name in (WEIGHTS, AVERAGE, STEPS) if name in first}
    ranged = [name for name in first if name not in state]
    return state | {name: torch.cat([parts[rank][name] for rank in replicas]) for name in ranged}


def _copy_boxes(common: Mapping[str, Box], shard: FlatParams, flat: Tensor, params: FlatParams, target: Tensor) -> None:
    """Copy the boxes that two shards have in common from one flat tensor to another."""
    for name, both in common.items():
        source = _view(flat, shard, name)[relative(both, shard.box(name))]
        _view(target, params, name)[relative(both, params.box(name))] = source


def _view(flat: Tensor, params: FlatParams, name: str) -> Tensor:
    span = params.span(name)
    return flat[span.start : span.stop].view([stop - start for start, stop in params.box(name)])
