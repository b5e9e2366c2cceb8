"""The share of useful time of PPO on 1,024 to 16,384 GPUs with failures, simulated.

    python -m experiments.goodput.study

Writes results.json, table.md and goodput.svg to this folder; README.md has question, design and verdict. Continues an
interrupted run: remove results.json to start again.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from statistics import mean, stdev

from experiments.goodput.chart import bars_svg
from experiments.plan_search.workloads import WORKLOADS, planner_for
from realhf.api.config import ExperimentConfig
from realhf.api.machine import Hardware
from realhf.launch.elastic import plan_restart
from realhf.plan.cost.checkpoint import checkpoint_size, checkpoint_times, restore_seconds
from realhf.plan.goodput import CheckpointTimes, FailureRate, best_cadence, scratch_share, useful_share
from realhf.plan.search.failures import (
    FailureSimulator,
    NodeFailure,
    RecoveryRule,
    RunResult,
    SimulatedPlan,
    SlowPeriod,
    StepOps,
    step_ops,
)

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
HOUR, DAY = 3600.0, 86400.0
GPUS = (1024, 4096, 16384)
MTBF_HOURS = {"50,700 h": 50_700.0, "25,200 h": 25_200.0, "5,000 h": 5_000.0}
"""Per GPU: Llama 3 405B, OPT-175B, and a pessimistic case."""
FIXED_HOURS = (0.25, 1.0, 4.0)
SEEDS = range(1, 6)
HORIZON = 7 * DAY
SHORT_JOB = DAY  # of useful time, for restarts from scratch
STARTUP_S, REPAIR_S = 180.0, 4 * HOUR
SLOW_STORAGE = 10.0  # times the seconds of writing and reading
SLOW_FACTOR, SLOW_HOURS = 1.34, 1.0
NODE_SIZE, REPLICA = 8, 16  # GPUs of a node, and of a replica of the plan
FOREVER = 1 << 30


@dataclass(frozen=True)
class Case:
    """The constants of a number of GPUs."""

    gpus: int
    ops: StepOps
    step_s: float
    times: CheckpointTimes
    restart_s: float
    detect_s: float

    @property
    def n_nodes(self) -> int:
        return self.gpus // NODE_SIZE

    def rate(self, mtbf_hours: float) -> FailureRate:
        return FailureRate(mtbf_hours * HOUR / self.gpus, self.detect_s + self.restart_s)


@dataclass(frozen=True)
class Row:
    """Shares of useful time over seeds; ``expected`` is the closed form, NaN where none applies."""

    gpus: int
    mtbf_hours: float
    policy: str
    cadence: int | None
    expected: float
    shares: list[float]
    failures: float
    repeated_steps: float
    down_share: float


@cache
def predicted_step() -> tuple[StepOps, float, float, CheckpointTimes, float]:
    """Return the step of PPO with a 70B actor on 1,024 GPUs: operations, seconds, idle share, checkpoint, restore."""
    WORKLOADS["goodput"] = (4096, 1024, 7168)
    planner = planner_for("70B", GPUS[0], "goodput")
    plan = planner.by_heuristic("megatron")
    prediction = planner.predict(plan)
    hardware: Hardware = planner.calls.hardware
    assert prediction.peak <= hardware.usable and plan["actor_train"].layout.strategy.world == GPUS[0]
    assert GPUS[0] // plan["actor_train"].layout.strategy.dp == REPLICA
    size = checkpoint_size(planner.calls.cost, plan)
    print(
        f"{plan['actor_train']}: {prediction.seconds:.1f} s, checkpoint {size.total / 1e12:.2f} TB, {size}", flush=True
    )
    times = checkpoint_times(planner.calls.cost, size, hardware.disk)
    ops = step_ops(prediction.timeline, planner.calls.cost.speed.call)
    return ops, prediction.seconds, prediction.timeline.idle, times, restore_seconds(size, hardware.disk)


def case_of(gpus: int) -> Case:
    """Return a case by weak scaling: prompts per replica, and so the times of a step, do not change.

    The optimizer ranges of a worker shrink with the replicas; the times of a checkpoint on 1,024 GPUs are kept.
    """
    ops, step_s, _, times, restore_s = predicted_step()
    return Case(gpus, ops, step_s, times, STARTUP_S + restore_s, ExperimentConfig().heartbeat_timeout)


def failures(case: Case, mtbf_hours: float, seed: int) -> Iterator[NodeFailure]:
    """Yield failures with exponential distances; the same seed has the same failures under every policy."""
    random, now = Random(f"{seed} {case.gpus} failures"), 0.0
    while True:
        now += random.expovariate(1.0) * mtbf_hours * HOUR / case.gpus
        yield NodeFailure(now, random.randrange(case.n_nodes))


def slow_periods(case: Case, mtbf_hours: float, seed: int) -> list[SlowPeriod]:
    """Return slow GPUs, which are as frequent as failures and slow for an exponential time."""
    random, now, found = Random(f"{seed} {case.gpus} slow"), 0.0, []
    while (now := now + random.expovariate(1.0) * mtbf_hours * HOUR / case.gpus) < HORIZON:
        stop = now + random.expovariate(1 / (SLOW_HOURS * HOUR))
        found.append(SlowPeriod(now, stop, random.randrange(GPUS[0]), SLOW_FACTOR))
    return found


def scaled(ops: StepOps, factor: float) -> StepOps:
    calls = {mfc: tuple((groups, seconds * factor) for groups, seconds in some) for mfc, some in ops.calls.items()}
    return replace(ops, calls=calls)


def elastic_plan(case: Case, mtbf_hours: float, n_nodes: int) -> SimulatedPlan:
    """Return the plan on fewer nodes: as many whole replicas as fit; the one with most prompts determines the step.

    ``launch/elastic.py`` decides how the run restarts, and the planner chooses the cadence again.
    """
    config = ExperimentConfig(n_nodes=case.n_nodes, n_gpus_per_node=NODE_SIZE, allocation_mode="search")
    restart = plan_restart(config, {}, "cuda", n_nodes, ())
    assert restart is not None and restart.workers == n_nodes * NODE_SIZE and not restart.refusal
    all_replicas, per_replica = case.gpus // REPLICA, WORKLOADS["goodput"][0] * REPLICA // GPUS[0]
    replicas = max(1, restart.workers // REPLICA)
    factor = math.ceil(all_replicas * per_replica / replicas) / per_replica
    rate = FailureRate(mtbf_hours * HOUR / restart.workers, case.rate(mtbf_hours).down_s)
    cadence = best_cadence(case.step_s * factor, case.times, rate, FOREVER)
    return SimulatedPlan(n_nodes, scaled(case.ops, factor), cadence, case.times)


def row_of(
    case: Case, mtbf: float, policy: str, cadence: int | None, expected: float, runs: Sequence[RunResult]
) -> Row:
    shares = [run.share(case.step_s) for run in runs]
    repeated, down = mean(run.executed - run.kept for run in runs), mean(run.down_s / run.seconds for run in runs)
    return Row(case.gpus, mtbf, policy, cadence, expected, shares, mean(run.failures for run in runs), repeated, down)


def study(case: Case, mtbf: float, with_recovery: bool = True) -> list[Row]:
    """Compare cadences, and for the published rate of failures also ways to recover."""
    rate, rows = case.rate(mtbf), []
    graph = planner_for("70B", GPUS[0], "goodput").graph
    spare = RecoveryRule(case.detect_s, case.restart_s)
    auto = best_cadence(case.step_s, case.times, rate, FOREVER)
    fixed = {f"every {hours:g} h": max(1, round(hours * HOUR / case.step_s)) for hours in FIXED_HOURS}

    def simulated(policy: str, simulator: FailureSimulator, rule: RecoveryRule, cadence: int | None, expected: float,
                  n_steps: int = FOREVER, is_slow: bool = False) -> None:  # fmt: skip
        runs = [simulator.run(rule, failures(case, mtbf, seed), case.n_nodes, n_steps, HORIZON,
                              slow_periods(case, mtbf, seed) if is_slow else ()) for seed in SEEDS]  # fmt: skip
        rows.append(row_of(case, mtbf, policy, cadence, expected, runs))
        print(f"{case.gpus:>6} {mtbf:>7.0f} h {policy:<22} {mean(rows[-1].shares):.4f} ({expected:.4f})", flush=True)

    @cache
    def constant(cadence: int | None) -> FailureSimulator:
        return FailureSimulator(graph, lambda n: SimulatedPlan(n, case.ops, cadence, case.times))

    for policy, cadence in {"auto": auto, **fixed}.items():
        simulated(policy, constant(cadence), spare, cadence, useful_share(case.step_s, cadence, case.times, rate))
    if not with_recovery:
        return rows
    job = round(SHORT_JOB / case.step_s)
    simulated("from scratch, 1 day", constant(None), spare, None, scratch_share(job * case.step_s, rate), job)
    if mtbf != MTBF_HOURS["50,700 h"]:
        return rows
    own = replace(spare, restart_s=STARTUP_S + case.times.write_s)
    simulated(
        "auto, own restore",
        constant(auto),
        own,
        auto,
        useful_share(case.step_s, auto, case.times, replace(rate, down_s=own.detect_s + own.restart_s)),
    )
    simulated("auto, slow GPUs", constant(auto), spare, auto, math.nan, is_slow=True)
    wait = RecoveryRule(case.detect_s, case.restart_s, REPAIR_S)
    simulated("auto, wait for repair", constant(auto), wait, auto, math.nan)
    elastic = FailureSimulator(graph, cache(lambda n: elastic_plan(case, mtbf, n)))
    simulated("auto, elastic", elastic, replace(wait, is_elastic=True), auto, math.nan)
    simulated("auto, elastic, regrow", elastic, replace(wait, is_elastic=True, regrows=True), auto, math.nan)
    return rows


def standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values))


def table(rows: Sequence[Row], case: Case) -> str:
    head = ("GPUs", "MTBF per GPU, h", "policy", "steps", "useful time, %", "closed form, %", "failures",
            "repeated steps", "down, %")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        share = f"{100 * mean(row.shares):.2f} +- {100 * standard_error(row.shares):.2f}"
        expected = "-" if math.isnan(row.expected) else f"{100 * row.expected:.2f}"
        cells = (f"{row.gpus:,}", f"{row.mtbf_hours:,.0f}", row.policy, str(row.cadence or "-"), share, expected,
                 f"{row.failures:.1f}", f"{row.repeated_steps:.1f}", f"{100 * row.down_share:.1f}")  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(f"\nA step takes {case.step_s:.1f} s, the copy of a checkpoint {case.times.copy_s:.2f} s, its writing "
                 f"{case.times.write_s:.0f} s, a restart {case.detect_s:.0f} + {case.restart_s:.0f} s.")  # fmt: skip
    return "\n".join(lines) + "\n"


def study_slow_storage(case: Case) -> list[Row]:
    """Compare cadences where writing outlasts a step."""
    times = replace(case.times, write_s=SLOW_STORAGE * case.times.write_s)
    slow = replace(case, times=times)
    return [replace(row, policy=f"{row.policy}, slow storage") for row in study(slow, MTBF_HOURS["50,700 h"], False)]


def stored_rows() -> list[Row]:
    """Return the results of an earlier run of the study that was interrupted or is complete."""
    if not RESULTS.is_file():
        return []
    rows = json.loads(RESULTS.read_text())
    return [Row(**{**row, "expected": math.nan if row["expected"] is None else row["expected"]}) for row in rows]


def write(rows: Sequence[Row], case: Case) -> None:
    plain = [{**vars(row), "expected": None if math.isnan(row.expected) else row.expected} for row in rows]
    RESULTS.write_text(json.dumps(plain, indent=1) + "\n")
    (HERE / "table.md").write_text(table(rows, case))
    shown = [row for row in rows if row.mtbf_hours == MTBF_HOURS["50,700 h"] and "storage" not in row.policy]
    bars = {f"{gpus:,} GPUs": {row.policy: (mean(row.shares), standard_error(row.shares)) for row in shown
                               if row.gpus == gpus} for gpus in GPUS}  # fmt: skip
    title = "Useful time in 7 days, 50,700 h between failures of a GPU"
    (HERE / "goodput.svg").write_text(bars_svg(title, "useful time, %", bars))


def main() -> None:
    rows = stored_rows()
    for gpus in reversed(GPUS):
        case = case_of(gpus)
        for mtbf in MTBF_HOURS.values():
            if not any((row.gpus, row.mtbf_hours) == (gpus, mtbf) and "storage" not in row.policy for row in rows):
                rows += study(case, mtbf)
                write(rows, case)
        if not any(row.gpus == gpus and "storage" in row.policy for row in rows):
            rows += study_slow_storage(case)
            write(rows, case)
    print(table(rows, case_of(GPUS[0])))


if __name__ == "__main__":
    main()
