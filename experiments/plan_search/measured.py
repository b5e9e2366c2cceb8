"""The searched plan, all rules and random plans, run on four CPU workers of this machine.

    python -m experiments.plan_search.measured [FOLDER]

Creates two tiny models and a profile of this machine for them in FOLDER, plans three workloads, and runs every plan
once per round with the command line, in random order. Writes measured.json, measured.md and measured.svg (needs
matplotlib) beside this file; README.md has question, design and verdict. Continues an interrupted run: remove
measured.json to start again. The machine should be idle.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

from experiments.plan_search.measured_chart import chart
from experiments.plan_search.measurements import (
    SEARCHED,
    Design,
    MeasuredRun,
    PlanEntry,
    Plans,
    Results,
    RunKey,
    WorkloadResult,
    drift,
    read_results,
    summarize,
)
from experiments.plan_search.random_plans import random_plans
from realhf.api.execution_plan import ExecutionPlan
from realhf.apps.commands.quickstart import read_words
from realhf.apps.prepare.preflight import plan_report
from realhf.plan.compile.heuristic import HEURISTICS
from realhf.plan.compile.plan_text import plan_text
from realhf.plan.search.planner import Planner

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
REALHF = (sys.executable, "-m", "realhf")
N_WORKERS = 4
TIMEOUT_S = 300.0  # of a run, which takes about ten seconds
TARGET = 1.1  # searched / best
SIZES = {"small": (128, 4), "large": (256, 6)}
"""Hidden width and layers of the models."""


@dataclass(frozen=True)
class MeasuredWorkload:
    """PPO or GRPO: model sizes by role, and the options that differ."""

    models: dict[str, str]
    options: tuple[str, ...]


def lengths(n_prompts: int, response: int) -> tuple[str, ...]:
    return (f"dataset.train_bs_n_seqs={n_prompts}", f"ppo.gen.max_new_tokens={response}",
            f"ppo.gen.min_new_tokens={response}")  # fmt: skip


SMALL = dict.fromkeys(("actor", "critic", "ref", "rew"), "small")
WORKLOADS = {
    "short": MeasuredWorkload(SMALL, lengths(64, 24)),
    "long": MeasuredWorkload(SMALL, lengths(16, 96)),
    "grpo": MeasuredWorkload(
        {"actor": "small", "ref": "small", "rew": "large"},
        (*lengths(8, 32), "ppo.group_size=8", "ppo.disable_value=True", "ppo.advantage=group", "ppo.adv_norm=False",
         "ppo.kl_in=loss", "ppo.loss_aggregation=seq_mean"),
    ),
}  # fmt: skip


def call(*command: str, timeout_s: float = inf) -> None:
    """Run a command; SystemExit with the end of its output if it fails or takes too long."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    limit = None if timeout_s == inf else timeout_s
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit)
    except subprocess.TimeoutExpired as expired:
        raise SystemExit(f"{' '.join(command)}\ntook more than {timeout_s:g} s") from expired
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def prepare(folder: Path) -> None:
    """Create tasks and models, and profile this machine for the models, unless it was done before."""
    folder.mkdir(parents=True, exist_ok=True)
    for size, (hidden, layers) in SIZES.items():
        if not (folder / size / "model").exists():
            example = str(ROOT / "examples" / "arithmetic.py")
            call(sys.executable, example, str(folder / size), "--hidden", str(hidden), "--layers", str(layers))
    if not (folder / "profile.json").exists():
        models = ",".join(str(folder / size / "model") for size in SIZES)
        call(*REALHF, "profile", f"model={models}", f"n_gpus_per_node={N_WORKERS}", "threads_per_worker=1",
             "device=cpu", f"out={folder / 'profile.json'}")  # fmt: skip


def words(workload: MeasuredWorkload, folder: Path, allocation: str, trial: str, n_steps: int = 1) -> list[str]:
    """Return the options of a run."""
    models = [word for role, size in workload.models.items()
              for word in (f"{role}.config={folder / size / 'model'}", f"{role}.init_from_scratch=True")]  # fmt: skip
    task = folder / "small"
    return [*models, f"actor.tokenizer={task / 'tokenizer'}", f"dataset.path={task / 'train.jsonl'}",
            "ppo.ppo_n_minibatches=2", *workload.options, "device=cpu", f"n_gpus_per_node={N_WORKERS}",
            "threads_per_worker=1", f"planner.profile={folder / 'profile.json'}", f"allocation_mode={allocation}",
            f"fileroot={folder / 'runs'}", "experiment_name=measured", f"trial_name={trial}", "overwrite=True",
            f"exp_ctrl.total_train_steps={n_steps}", "n_logged_generations=0", "tensorboard.enabled=False"]  # fmt: skip


def planner_of(workload: MeasuredWorkload, folder: Path) -> Planner:
    experiment, _ = read_words("ppo", words(workload, folder, "d4", "plan"))
    report = plan_report("ppo", experiment)
    if not report.machine.is_measured:
        raise SystemExit(f"the profile is not used: {report.machine.source}; remove {folder / 'profile.json'}")
    return report.planner


def named_plans(planner: Planner, design: Design) -> dict[str, PlanEntry]:
    """Return the searched plan, the rules that fit, and random plans by allocation string."""
    plans: dict[str, ExecutionPlan] = {SEARCHED: planner.search(seed=design.seed, budget_s=inf).plan}
    for rule in HEURISTICS:
        with suppress(ValueError):  # the profile may lack a layout
            if planner.fits(plan := planner.by_heuristic(rule)):
                plans[rule] = plan
    others = random_plans(planner, design.n_random, design.seed, list(plans.values()))
    plans |= {f"random {number}": plan for number, plan in enumerate(others, 1)}
    entries: dict[str, PlanEntry] = {}
    for name, plan in plans.items():
        text = plan_text(plan, planner.calls.limits)
        names = entries[text].names if text in entries else ()
        entries[text] = PlanEntry((*names, name), planner.predict(plan).seconds)
    return entries


def run(key: RunKey, n_steps: int, folder: Path) -> MeasuredRun:
    """Run a plan for a number of steps, and remove its directory."""
    root, load = folder / "runs" / "measured" / key.workload, os.getloadavg()[0]
    options = words(WORKLOADS[key.workload], folder, key.allocation, key.workload, n_steps)
    call(*REALHF, "quickstart", "ppo", *options, timeout_s=TIMEOUT_S)
    steps = [json.loads(line)["time/step_s"] for line in (root / "metrics.jsonl").read_text().splitlines()]
    expected = json.loads((root / "plan.json").read_text())["expected"]
    assert len(steps) == n_steps and expected["is_measured"], expected["source"]
    shutil.rmtree(root)
    return MeasuredRun(key.workload, key.allocation, key.round, tuple(steps), expected["step_s"], load)


def table(results: Sequence[WorkloadResult], drifted: float) -> str:
    """Return the summary, and all plans by measured time."""
    head = ("workload", "plans", "searched, s", "best measured, s", "its plan", "searched / best", "rank correlation",
            "median error of predictions")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for result in results:
        chosen, best = result.chosen, result.best
        lines.append(f"| {result.workload} | {len(result.plans)} | {chosen.measured_s:.3f} +- {chosen.error:.3f} | "
                     f"{best.measured_s:.3f} +- {best.error:.3f} | {', '.join(best.names)} | {result.ratio:.3f} | "
                     f"{result.correlation:.2f} | {100 * result.prediction_error:.0f}% |")  # fmt: skip
    met = all(result.ratio <= TARGET for result in results)
    lines.append(f"\nTarget (searched <= {TARGET} x best in each workload): {'met' if met else 'not met'}. Drift, last "
                 f"round / first: {drifted:.2f}. +- is one standard error over runs.")  # fmt: skip
    for result in results:
        lines += [
            f"\n## {result.workload}\n",
            "| plan | predicted, s | measured, s | allocation |",
            "|---|---|---|---|",
        ]
        for plan in sorted(result.plans, key=lambda plan: plan.measured_s):
            lines.append(f"| {', '.join(plan.names)} | {plan.predicted_s:.3f} | {plan.measured_s:.3f} +- "
                         f"{plan.error:.3f} | `{plan.allocation}` |")  # fmt: skip
    return "\n".join(lines) + "\n"


def report(results: Results, out: Path) -> None:
    """Write the table and the figure beside the results file."""
    summaries = [summarize(plans, results.runs, workload) for workload, plans in results.plans.items()]
    known = [summary for summary in summaries if summary]
    if known:
        text = table(known, drift(results.runs))
        out.with_suffix(".md").write_text(text)
        chart(known, out.with_suffix(".svg"))
        print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path(tempfile.gettempdir()) / "plan_search_measured"
    parser.add_argument("folder", nargs="?", type=Path, default=folder, help="for models, profile and runs")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--random", type=int, default=20, help="number of random plans")
    parser.add_argument("--rounds", type=int, default=2, help="runs of every plan")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE / "measured.json", help="results file")
    options = parser.parse_args()
    folder = options.folder.resolve()
    results = read_results(options.out, Design(options.seed, options.random, options.rounds))
    prepare(folder)
    missing: Plans = {name: named_plans(planner_of(WORKLOADS[name], folder), results.design)
                      for name in options.workloads if name not in results.plans}  # fmt: skip
    results.plans |= missing
    results.write(options.out)
    pending = [key for key in results.pending() if key.workload in options.workloads]
    for number, key in enumerate(pending, 1):
        entry = results.plans[key.workload][key.allocation]
        done = run(key, entry.n_steps, folder)
        results.runs.append(done)
        results.write(options.out)
        print(f"{number}/{len(pending)} {key.workload} round {key.round + 1}, {entry.names[0]}: "
              f"predicted {done.predicted_s:.3f} s, measured {done.seconds:.3f} s", flush=True)  # fmt: skip
    report(results, options.out)


if __name__ == "__main__":
    main()
