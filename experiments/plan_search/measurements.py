"""What the measured part of the study runs in which order, its results file, and statistics of the results."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import correlation, mean, median, stdev
from typing import Any

from realhf.base.atomic_io import atomic_write

SEARCHED = "searched"
FEWEST_STEPS, MOST_STEPS, RUN_S = 4, 10, 4.0  # of a run


@dataclass(frozen=True)
class PlanEntry:
    """A plan to run: its names, several if a rule and the search agree, and predicted seconds of a step."""

    names: tuple[str, ...]
    predicted_s: float

    @property
    def n_steps(self) -> int:
        """Steps of a run: as many as take about ``RUN_S`` seconds by the prediction."""
        return max(FEWEST_STEPS, min(MOST_STEPS, round(RUN_S / self.predicted_s)))


Plans = dict[str, dict[str, PlanEntry]]
"""By workload and allocation string."""


@dataclass(frozen=True)
class Design:
    """What determines the plans and their order."""

    seed: int
    n_random: int
    rounds: int


@dataclass(frozen=True)
class RunKey:
    workload: str
    allocation: str
    round: int


@dataclass(frozen=True)
class MeasuredRun:
    """A run of a plan: seconds of all steps, the prediction, and the load average of the machine before it."""

    workload: str
    allocation: str
    round: int
    step_s: tuple[float, ...]
    predicted_s: float
    load: float

    @property
    def key(self) -> RunKey:
        return RunKey(self.workload, self.allocation, self.round)

    @property
    def seconds(self) -> float:
        """Median seconds of a step, without the first one."""
        return median(self.step_s[1:])


@dataclass(frozen=True)
class PlanResult:
    """Predicted and measured seconds of a plan's step; ``error`` is the standard error of the mean over its runs."""

    names: tuple[str, ...]
    allocation: str
    predicted_s: float
    measured_s: float
    error: float


@dataclass(frozen=True)
class WorkloadResult:
    """The plans of a workload. ``correlation`` is Spearman's, of predicted and measured seconds."""

    workload: str
    plans: tuple[PlanResult, ...]

    @property
    def chosen(self) -> PlanResult:
        return next(plan for plan in self.plans if SEARCHED in plan.names)

    @property
    def best(self) -> PlanResult:
        return min(self.plans, key=lambda plan: plan.measured_s)

    @property
    def ratio(self) -> float:
        """Measured seconds of the searched plan / those of the fastest plan."""
        return self.chosen.measured_s / self.best.measured_s

    @property
    def correlation(self) -> float:
        return spearman([plan.predicted_s for plan in self.plans], [plan.measured_s for plan in self.plans])

    @property
    def prediction_error(self) -> float:
        """Median of |predicted / measured - 1|."""
        return median(abs(plan.predicted_s / plan.measured_s - 1) for plan in self.plans)


@dataclass
class Results:
    """The content of the results file, which is written after every run."""

    design: Design
    plans: Plans
    runs: list[MeasuredRun]

    def pending(self) -> list[RunKey]:
        """Return the runs that have not been made, in the order of the design."""
        done = {run.key for run in self.runs}
        return [key for key in schedule(self.plans, self.design) if key not in done]

    def write(self, file: Path) -> None:
        plans = {name: {text: asdict(entry) for text, entry in some.items()} for name, some in self.plans.items()}
        content = {"design": asdict(self.design), "plans": plans, "runs": [asdict(run) for run in self.runs]}
        atomic_write(file, json.dumps(content, indent=1) + "\n")


def read_results(file: Path, design: Design) -> Results:
    """Return the results of an interrupted run, or empty ones; SystemExit if the file has another design."""
    if not file.exists():
        return Results(design, {}, [])
    try:
        content: dict[str, Any] = json.loads(file.read_text())
        found = Design(**content["design"])
        runs = [MeasuredRun(**{**run, "step_s": tuple(run["step_s"])}) for run in content["runs"]]
        plans = {name: {text: PlanEntry(tuple(entry["names"]), entry["predicted_s"]) for text, entry in some.items()}
                 for name, some in content["plans"].items()}  # fmt: skip
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SystemExit(f"{file} is not a results file of this study ({error!r}): move it away") from error
    if found != design:
        raise SystemExit(f"{file} has {found}, not {design}: repeat its options, or move it away")
    return Results(design, plans, runs)


def schedule(plans: Plans, design: Design) -> list[RunKey]:
    """Return all runs: every plan of every workload once per round, in a random order that the seed determines.

    A drift of the machine's speed affects all plans alike.
    """
    keys: list[RunKey] = []
    for number in range(design.rounds):
        some = [RunKey(workload, text, number) for workload, texts in plans.items() for text in texts]
        Random(f"{design.seed} {number}").shuffle(some)
        keys += some
    return keys


def summarize(plans: Mapping[str, PlanEntry], runs: Sequence[MeasuredRun], workload: str) -> WorkloadResult | None:
    """Return the results of a workload's plans that have been run; None if the searched plan has not."""
    found = []
    for text, entry in plans.items():
        some = [run for run in runs if (run.workload, run.allocation) == (workload, text)]
        if some:
            seconds = [run.seconds for run in some]
            error = stdev(seconds) / math.sqrt(len(seconds)) if len(seconds) > 1 else 0.0
            predicted = mean(run.predicted_s for run in some)
            found.append(PlanResult(entry.names, text, predicted, mean(seconds), error))
    result = WorkloadResult(workload, tuple(found))
    return result if any(SEARCHED in plan.names for plan in found) else None


def drift(runs: Sequence[MeasuredRun]) -> float:
    """Return the median over plans of the last round's seconds / the first one's; 1 if no plan was run twice."""
    by_plan: dict[tuple[str, str], list[MeasuredRun]] = {}
    for run in sorted(runs, key=lambda run: run.round):
        by_plan.setdefault((run.workload, run.allocation), []).append(run)
    ratios = [some[-1].seconds / some[0].seconds for some in by_plan.values() if len(some) > 1]
    return median(ratios) if ratios else 1.0


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of every value from 0; equal values have their mean rank."""
    return [sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
            for value in values]  # fmt: skip


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the rank correlation of two lists; NaN if all values of one are equal, or with fewer than two values."""
    if len(set(a)) < 2 or len(set(b)) < 2:
        return math.nan
    return correlation(ranks(a), ranks(b))
