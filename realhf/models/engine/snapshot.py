"""The trained state of an engine as tensors: saved for a checkpoint, restored under the same or another layout.

A checkpoint is a layout on disk. For every model shard the first replica writes ``weights`` (and ``average``, the
float32 moving average of bfloat16 weights); every replica writes its range of the optimizer state: ``first``,
``second`` and, for bfloat16 weights, ``master``. All of them are flat (models/flat_params.py). In a ZeRO-3 layout every
worker is a model shard of its own. Where data-parallel ranks divide experts, those have a range of their own.
"""

from collections.abc import Callable, Mapping
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.api.layout import Coord, Layout
from realhf.api.param_box import intersect, relative
from realhf.models.engine.native import NativeEngine, empty_shard
from realhf.models.engine.optimizer import EXPERTS

Read = Callable[[int], Mapping[str, Tensor]]
"""Returns the tensors that a rank of the saved layout wrote."""
WEIGHTS, AVERAGE, STEPS = "weights", "average", "steps"


def snapshot(engine: NativeEngine) -> dict[str, Tensor]:
    """Return copies in host memory of the tensors that this worker saves; none if other workers save all of them."""
    state: dict[str, Tensor] = {}
    if engine.context.layout.has_first_copy(engine.context.rank):
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
    flats, steps = _merged_shard(engine, saved, read)
    engine.params.data.copy_(flats[WEIGHTS])
    if AVERAGE in flats:
        engine.params.average = flats[AVERAGE].to(engine.params.data.device)
    if engine.optimizer is None:
        return
    for some in engine.optimizer.ranges:
        for name, tensor in some.state.items():
            tensor.copy_(flats[name][some.start : some.stop])
    engine.optimizer.steps = steps


def _merged_shard(engine: NativeEngine, saved: Layout, read: Read) -> tuple[dict[str, Tensor], int]:
    """Return this worker's flat tensors, merged over the saved shards and replicas, and the number of steps."""
    params, strategy, coord = engine.params, engine.context.layout.strategy, engine.context.coord
    numel, steps = params.data.numel(), 0
    stages = [(some.pp, some.vpp) for some in (saved.strategy, strategy)]
    if stages[0] == stages[1] and saved.strategy.cuts == strategy.cuts and strategy.expert_dp == 1:
        number = strategy.shard_number(coord.dp, coord.tp)
        state = _read_shard(saved, coord.pp, number, read)  # it differs only in the padding at its end
        steps = int(state.pop(STEPS, torch.zeros(1)))
        resize = lambda flat: flat[:numel] if len(flat) >= numel else F.pad(flat, (0, numel - len(flat)))
        return {name: resize(flat) for name, flat in state.items()}, steps
    flats: dict[str, Tensor] = {}
    for pp, number in product(range(saved.strategy.pp), range(saved.strategy.n_shards)):
        first, *_ = _replicas(saved, pp, number)
        shard = empty_shard(engine.config, saved, first, params.data.dtype, "meta", len(saved.axis("replicas", first)))
        common = {name: both for name in set(shard.names) & set(params.names)
                  if (both := intersect(shard.box(name), params.box(name)))}  # fmt: skip
        if not common:
            continue
        state = _read_shard(saved, pp, number, read)
        steps = int(state.pop(STEPS, torch.zeros(1)))
        for kind, flat in state.items():
            target = flats.setdefault(kind, torch.zeros(numel, dtype=flat.dtype))
            for name, both in common.items():
                source = shard.view_of(flat, name)[relative(both, shard.box(name))]
                params.view_of(target, name)[relative(both, params.box(name))] = source
    return flats, steps


def _replicas(layout: Layout, pp: int, number: int) -> list[int]:
    """Return the workers that hold a shard of a stage, the first replica's first."""
    strategy = layout.strategy
    coords = [Coord(pp, dp, tp) for dp in range(strategy.dp) for tp in range(strategy.tp)]
    return [layout.rank(at) for at in coords if strategy.shard_number(at.dp, at.tp) == number]


def _read_shard(saved: Layout, pp: int, number: int, read: Read) -> dict[str, Tensor]:
    """Return the flat tensors of a saved model shard; the ranges of the optimizer are concatenated."""
    holders = _replicas(saved, pp, number)
    first = read(holders[0])
    state = {name: first[name] for name in (WEIGHTS, AVERAGE, STEPS) if name in first}
    ranged = [name for name in first if name not in state and not name.startswith(EXPERTS)]
    all_holders = holders if saved.strategy.zero3 else saved.axis("replicas", holders[0])
    parts = {rank: read(rank) for rank in sorted({*holders, *all_holders})}  # ranges are ordered by rank
    for name in ranged:
        ranges = [parts[rank][name] for rank in sorted(all_holders)]
        if f"{EXPERTS}{name}" in first:
            ranges += [parts[rank][f"{EXPERTS}{name}"] for rank in sorted(holders)]
        state[name] = torch.cat(ranges)
    return state
