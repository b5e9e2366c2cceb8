"""Plans for several values of an option: the size of the cluster, or any other whole number."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from realhf.api.config import Device
from realhf.api.config.choices import Backend
from realhf.api.config.option import leaves
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.experiment import Experiment, MultiStageExperiment
from realhf.apps.prepare.plan_report import PlanReport
from realhf.apps.prepare.preflight import Findings, pick_device, plan_report
from realhf.base.errors import UserError, did_you_mean
from realhf.plan.advice.goals import Goal
from realhf.plan.compile.allocate import PLANNED
from realhf.plan.machines.hardware import read_hardware

N_GPUS = "n_gpus"
SIZES = ("n_nodes", "n_gpus_per_node")
MAX_VALUES = 64
FORMAT = "write --sweep n_gpus=16,32,64, n_gpus=8..128 (doubling) or n_nodes=2..8..2 (in steps of 2)"


@dataclass(frozen=True)
class Sweep:
    """An option and its values in ascending order; ``n_gpus`` stands for ``n_nodes`` and ``n_gpus_per_node``."""

    key: str
    values: tuple[int, ...]


@dataclass(frozen=True)
class SweepPoint:
    value: int
    report: PlanReport

    @property
    def n_workers(self) -> int:
        return self.report.plan.n_workers


def parse_sweep(text: str) -> Sweep:
    """Parse ``KEY=1,2,4``, ``KEY=1..8`` (1, 2, 4, 8) or ``KEY=2..8..2`` (2, 4, 6, 8), and combinations with commas."""
    key, equals, given = text.partition("=")
    values: set[int] = set()
    for part in given.split(",") if equals and key else ():
        span = re.fullmatch(r"(\d+)(?:\.\.(\d+)(?:\.\.(\d+))?)?", part.strip())
        first, last, step = (int(n) if n else None for n in span.groups()) if span else (None, None, None)
        if first is None or first < 1 or (last is not None and last < first) or step == 0:
            raise UserError(f"--sweep {text}: '{part}' is not a positive number or an ascending range; {FORMAT}")
        values |= set(_span(first, first if last is None else last, step))
    if not values or len(values) > MAX_VALUES:
        problem = f"{len(values)} values are more than {MAX_VALUES}" if values else "there are no values"
        raise UserError(f"--sweep {text}: {problem}; {FORMAT}")
    return Sweep(key, tuple(sorted(values)))


def _span(first: int, last: int, step: int | None) -> Sequence[int]:
    if step:
        return range(first, min(last, first + step * MAX_VALUES) + 1, step)
    found = [first << k for k in range(32) if first << k <= last]
    return [*found, last]


def swept(
    name: str, read: Callable[[Sequence[str]], Experiment], sweep: Sweep, goal: Goal = Goal.step
) -> list[SweepPoint]:
    """Return the plans of all values; ``read`` returns the experiment with more words. ``UserError`` lists problems.

    A search considers the plan of the next smaller cluster too, so that a larger one is not slower.
    """
    base, is_size = read([]), sweep.key in (N_GPUS, *SIZES)
    check_sweep(sweep, base, name)
    findings, points = Findings(), list[SweepPoint]()
    for value in sweep.values:

        def planned(value: int = value) -> PlanReport:
            words = cluster_words(value, base) if sweep.key == N_GPUS else [f"{sweep.key}={value}"]
            smaller = points[-1:] if is_size else []
            return plan_report(name, read(words), goal, [_searched(point.report.plan) for point in smaller])

        try:
            points.append(SweepPoint(value, planned()))
        except UserError as error:
            findings.invalid += [f"{sweep.key}={value}: {problem}" for problem in error.problems]
    findings.report()
    return points


def _searched(plan: ExecutionPlan) -> ExecutionPlan:
    """Return a plan as a search makes it: the options of the calls set their backends later."""
    placements = {name: replace(placement, backend=Backend.native) for name, placement in plan.placements.items()}
    return replace(plan, placements=placements)


def check_sweep(sweep: Sweep, experiment: Experiment, name: str) -> None:
    if isinstance(experiment, MultiStageExperiment):
        raise UserError(f"--sweep: {name} consists of several runs that are planned one by one")
    types = {key: field.type for key, field, _ in leaves(experiment)}
    whole = [key for key, kind in types.items() if kind in (int, int | None)]
    if sweep.key != N_GPUS and sweep.key not in whole:
        problem = "is not a whole number" if sweep.key in types else "is unknown"
        raise UserError(f"--sweep {sweep.key}: the option {problem}{did_you_mean(sweep.key, [N_GPUS, *whole])}")
    mode = experiment.allocation_mode
    if sweep.key in (N_GPUS, *SIZES) and mode not in PLANNED:
        raise UserError(f"--sweep {sweep.key}: allocation_mode={mode} is for one number of workers; "
                        f"use {', '.join(PLANNED)}")  # fmt: skip


def node_size(experiment: Experiment) -> int:
    """Return the workers per node: those of the options, or else of the hardware; one node of any size on CPU."""
    device = pick_device(experiment, launching=False)
    if device == Device.cpu.value:
        return 0
    if experiment.n_gpus_per_node > 1 or experiment.n_nodes > 1:
        return experiment.n_gpus_per_node
    return read_hardware(experiment.planner.hardware or "h100").node_size


def cluster_words(n_gpus: int, experiment: Experiment) -> list[str]:
    """Return the options of a cluster with this many GPUs: full nodes, or a part of one node."""
    size = node_size(experiment)
    if not size or n_gpus <= size:
        return ["n_nodes=1", f"n_gpus_per_node={n_gpus}"]
    if n_gpus % size:
        below = n_gpus // size * size
        raise UserError(f"not a multiple of {size} GPUs per node; nearest: {below} or {below + size}")
    return [f"n_nodes={n_gpus // size}", f"n_gpus_per_node={size}"]


def smaller_clusters(experiment: Experiment) -> Sweep:
    """Return the sizes of cluster that ``--goal cost`` compares: all workers, halves, and so on down to one."""
    n = experiment.n_nodes * experiment.n_gpus_per_node
    sizes = {n}
    nodes = experiment.n_nodes
    while nodes > 1:
        nodes //= 2
        sizes.add(nodes * experiment.n_gpus_per_node)
    per_node = experiment.n_gpus_per_node
    while per_node > 1:
        per_node //= 2
        sizes.add(per_node)
    return Sweep(N_GPUS, tuple(sorted(sizes)))


def cheapest(points: Sequence[SweepPoint]) -> SweepPoint:
    """Return the plan with the fewest GPU-seconds per step among those that fit; the largest cluster if none does."""
    fitting = [point for point in points if point.report.fits]
    return min(fitting, key=lambda p: (p.report.economy.worker_hours, p.report.prediction.seconds), default=points[-1])


def with_goal(experiment: Experiment, goal: Goal) -> Experiment:
    """Return the experiment with a search, which goals other than ``step`` need."""
    if experiment.allocation_mode in ("heuristic", "search"):
        return replace(experiment, allocation_mode="search")
    raise UserError(f"--goal {goal.value}: allocation_mode={experiment.allocation_mode} leaves no choice; "
                    "set allocation_mode=search")  # fmt: skip
