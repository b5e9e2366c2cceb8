"""Bytes and seconds of a checkpoint of a plan (models/engine/snapshot.py): what workers copy, write and read."""

from dataclasses import dataclass
from itertools import product

from realhf.api.config import OptimizerType
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.experiment import RoleSpec
from realhf.api.layout import Coord
from realhf.api.machine import Link
from realhf.plan.compile.program import home_layout
from realhf.plan.cost.cost import CostModel
from realhf.plan.cost.speed import itemsize, optimizer_bytes, shard_numels, updated_numels
from realhf.plan.goodput import CheckpointTimes

VERIFY_BYTES_PER_S = 1.4e9
"""The speed at which the master checks the files of a checkpoint before a resume, one after the other: SHA-256 on one
core with instructions for it, measured on a server CPU."""


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes of a checkpoint: in total, written by the worker with most, and read by the worker with most."""

    total: float
    written: float
    read: float


def checkpoint_size(cost: CostModel, plan: ExecutionPlan) -> CheckpointSize:
    """Return the size of a checkpoint. A worker that restores a role reads the whole state of its shard.

    The first replica writes the weights, every replica an equal range of the optimizer state. Rows of partial rollouts
    and of rollouts ahead of training are not counted.
    """
    written, read, total = dict[int, float](), dict[int, float](), 0.0
    for role in cost.graph.roles:
        if cost.graph.updater(role) is None:
            continue
        layout = home_layout(cost.graph, plan, role)
        strategy = layout.strategy
        weights, state = _bytes_per_parameter(cost, role)
        numels = shard_numels(cost.models[role], strategy)
        updated = updated_numels(cost.models[role], strategy)
        for pp, dp, tp in product(range(strategy.pp), range(strategy.dp), range(strategy.tp)):
            rank, numel = layout.rank(Coord(pp, dp, tp)), numels[pp]
            own = updated[pp] * state + numel * weights * layout.has_first_copy(rank)
            written[rank] = written.get(rank, 0.0) + own
            read[rank] = read.get(rank, 0.0) + numel * (weights + state)
            total += own
    return CheckpointSize(total, max(written.values(), default=0.0), max(read.values(), default=0.0))


def checkpoint_times(cost: CostModel, size: CheckpointSize, disk: Link) -> CheckpointTimes:
    """Return the times of writing a checkpoint; all workers copy and write at once."""
    return CheckpointTimes(cost.speed.host_copy(size.written), disk.seconds(size.written))


def restore_seconds(size: CheckpointSize, disk: Link) -> float:
    """Return the seconds in which the master checks a checkpoint and the workers then read it."""
    return size.total / VERIFY_BYTES_PER_S + disk.seconds(size.read)


def _bytes_per_parameter(cost: CostModel, role: str) -> tuple[float, float]:
    """Return the bytes of weights (with a moving average in float32) and of optimizer state per parameter."""
    spec: RoleSpec = cost.roles[role]
    is_average = bool(spec.spec.bf16) and any(sync.target == role for sync in cost.graph.syncs)
    has_optimizer = cost.graph.trainer(role) is not None and spec.spec.optimizer.type is not OptimizerType.none
    return itemsize(spec) + 4.0 * is_average, float(optimizer_bytes(spec)) if has_optimizer else 0.0
