"""Monte-Carlo values against a critic: quality of values, and steps to a target accuracy, on sums.

    python -m experiments.vineppo.study [FOLDER] [--jobs N]

Runs everything in FOLDER (default: vineppo-run; finished runs are kept), writes results.json, table.md and figure.svg.
"""

import json
import math
from functools import partial
from pathlib import Path
from statistics import fmean, median

from matplotlib.figure import Figure

from experiments.studies import Results, Study, Verdict, cell, markdown, mean_and_error, verdict_of
from experiments.sums import StudyOptions, metrics, run, start_model, task_options
from experiments.vineppo.values import quality

HERE = Path(__file__).parent
HIDDEN, SFT_STEPS, PROMPTS, GROUP, EVAL_EVERY, TARGET = 64, 120, 16, 8, 5, 0.5
SEEDS, FASTER, BETTER = (1, 2, 3, 4, 5), 0.5, 0.1
STEPS = {"ppo-math": 120, "vineppo": 60, "grpo": 120, "rloo": 120}
OPTIONS = (f"ppo.group_size={GROUP}", "ppo.ppo_n_minibatches=2", "ppo.kl_in=loss", "ppo.kl_ctl=1e-4",
           "ppo.policy_loss=clip", "ppo.loss_aggregation=token_mean", "actor.optimizer.lr=3e-4",
           "actor.optimizer.lr_scheduler_type=constant")  # fmt: skip
OWN = {"ppo-math": ("critic.optimizer.lr=1e-3", "critic.optimizer.lr_scheduler_type=constant", "reward.wrong_reward=0"),
       "grpo": ("reward.wrong_reward=0",), "rloo": ("reward.wrong_reward=0",)}  # fmt: skip
N_PROBLEMS = 300
Points = list[dict[str, float]]


def train(folder: Path, model: Path, algorithm: str, seed: int) -> Points:
    """Return step, time and held-out accuracy at each evaluation."""
    task = task_options(folder, HIDDEN, model, PROMPTS, STEPS[algorithm], EVAL_EVERY)
    root = run(folder, f"{algorithm}-{seed}", algorithm, *task, *OPTIONS, *OWN.get(algorithm, ()), f"seed={seed}")
    points, seconds = Points(), 0.0
    for line in metrics(root):
        seconds += line.get("time/step_s", 0.0)
        if "eval/accuracy" in line:
            points.append({"step": line["step"], "seconds": seconds, "accuracy": line["eval/accuracy"]})
    print(f"{algorithm} seed {seed}: {points[-1]['accuracy']:.3f}", flush=True)
    return points


def values(folder: Path, seed: int) -> dict[str, float]:
    """Return the quality of values of the last policy of a PPO run."""
    lines = (folder / f"task{HIDDEN}" / "train.jsonl").read_text().splitlines()
    problems = [json.loads(line) for line in lines[-N_PROBLEMS:]]
    models = folder / "sums" / f"ppo-math-{seed}" / "models"
    last = f"step_{STEPS['ppo-math']}"
    found = quality(folder, f"values-{seed}", models / "actor" / last, models / "critic" / last, problems, seed)
    print(f"values, seed {seed}: {found}", flush=True)
    return found


def to_target(points: Points, key: str) -> float:
    """Return the step or time of the first evaluation that reaches the target; inf if none does."""
    return next((point[key] for point in points if point["accuracy"] >= TARGET), math.inf)


def verdict(results: Results) -> Verdict:
    critic, vine = (fmean(one[key] for one in results["values"]) for key in ("critic", "monte_carlo"))
    chance = fmean(one["chance"] for one in results["values"])
    steps = {name: median(to_target(points, "step") for points in runs) for name, runs in results["runs"].items()}
    is_faster = math.isfinite(steps["vineppo"]) and steps["vineppo"] <= FASTER * steps["ppo-math"]
    conditions = [vine >= critic + BETTER, is_faster]
    figures = (f"best next step picked: nine rollouts {vine:.2f}, critic {critic:.2f}, chance {chance:.2f}; median "
               f"steps to {TARGET}: {', '.join(f'{name} {value:g}' for name, value in steps.items())}")  # fmt: skip
    return verdict_of(conditions, figures)


def table(results: Results) -> str:
    rows = [[name, *(", ".join(f"{to_target(points, key):.0f}" for points in runs) for key in ("step", "seconds")),
             cell([points[-1]["accuracy"] for points in runs])] for name, runs in results["runs"].items()]  # fmt: skip
    quality_rows = [[name, cell([one[key] for one in results["values"]])] for name, key in
                    (("chance", "chance"), ("critic", "critic"), ("nine rollouts", "monte_carlo"))]  # fmt: skip
    target = f"to {TARGET:.0%}, by seed"
    return "\n".join([markdown(["algorithm", f"steps {target}", f"seconds {target}", "accuracy at the end"], rows),
                      markdown(["values", "best next step picked"], quality_rows)])  # fmt: skip


def draw(results: Results, figure: Figure) -> None:
    panels = figure.subplots(1, 2, sharey=True)
    for panel, key, label in zip(panels, ("step", "seconds"), ("step", "training time (s)"), strict=True):
        for name, runs in results["runs"].items():
            xs = [fmean(point[key] for point in points) for points in zip(*runs, strict=True)]
            some = [mean_and_error([point["accuracy"] for point in points]) for points in zip(*runs, strict=True)]
            means, errors = zip(*some, strict=True)
            panel.errorbar(xs, means, yerr=errors, capsize=2, marker=".", label=name)
        panel.axhline(TARGET, color="#999", linewidth=0.8)
        panel.set(xlabel=label, ylabel="held-out accuracy")
    panels[0].legend()


def collect(options: StudyOptions) -> Results:
    model = start_model(options.folder, HIDDEN, SFT_STEPS)
    found = options.map(partial(train, options.folder, model), list(STEPS), SEEDS)
    results: Results = {"runs": {name: runs for (name,), runs in found.items()}}
    results["values"] = options.map(partial(values, options.folder), SEEDS)[()]
    return results


STUDY = Study(HERE, __doc__ or "", collect, verdict, table, draw, (9, 3.6))

if __name__ == "__main__":
    STUDY.main()
