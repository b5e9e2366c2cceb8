"""A student of half the width learns sums from its teacher, or by GRPO: accuracy by sampled tokens.

    python -m experiments.distillation.study [FOLDER] [--jobs N]

Runs everything in FOLDER (default: distillation-run; finished runs are kept) and writes results.json, table.md and
curves.svg here. Students start from the same weak model. All methods have the same optimizer, whose rate falls linearly
to 0, and 16 prompts a step.
"""

import json
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import mean

from docs.curves_svg import curves_svg
from experiments.studies import cell
from experiments.sums import (
    Curve,
    curve,
    held_out_accuracy,
    run,
    study_options,
    supervised_model,
    task_options,
    tokens_to,
)

HERE = Path(__file__).parent
HIDDEN, SFT_STEPS, PROMPTS, EVAL_EVERY = 64, 120, 16, 20
TEACHER_STEPS = 400
SHARE = 0.9  # of the teacher's accuracy
SEEDS = (1, 2, 3)
METHODS = {  # experiment, steps, options
    "distill, forward KL": ("distill", 600, ("ppo.distill.objective=forward_kl", "ppo.distill.top_k=8")),
    "distill, reverse KL": ("distill", 600, ()),
    "GRPO": ("grpo", 1200, ("ppo.group_size=4",)),
    "GRPO, 600 steps": ("grpo", 600, ("ppo.group_size=4",)),
}
OPTIMIZER = ("actor.optimizer.lr=1e-3", "actor.optimizer.lr_scheduler_type=linear")


def study(folder: Path, student: Path, teacher: Path, method: str, seed: int) -> Curve:
    experiment, steps, options = METHODS[method]
    name = f"{'-'.join(method.replace(',', '').split())}-{seed}"
    of_teacher = (f"teacher.path={teacher}", "reward.fn=math") if experiment == "distill" else ()
    task = task_options(folder, HIDDEN, student, PROMPTS, steps, EVAL_EVERY)
    found = curve(run(folder, name, experiment, *task, *OPTIMIZER, *options, *of_teacher, f"seed={seed}"))
    print(f"{name} {found[-1][1]:.3f}", flush=True)
    return found


def mean_curve(runs: list[Curve]) -> Curve:
    """Return means over seeds of the tokens and accuracies at each evaluation."""
    return [(mean(tokens for tokens, _ in points), mean(found for _, found in points))
            for points in zip(*runs, strict=True)]  # fmt: skip


def table(curves: dict[str, list[Curve]], accuracy: float) -> str:
    goal = SHARE * accuracy
    rows = [f"Accuracy of the teacher: {accuracy:.3f}; {SHARE:.0%} of it: {goal:.3f}.", "",
            "| method | final accuracy | thousand sampled tokens to the goal, by seed |", "|---|---|---|"]  # fmt: skip
    for method, runs in curves.items():
        needed = [tokens_to(points, goal) for points in runs]
        texts = [f"{n / 1000:.0f}" if isfinite(n) else f"not in {runs[i][-1][0] / 1000:.0f}"
                 for i, n in enumerate(needed)]  # fmt: skip
        rows.append(f"| {method} | {cell([points[-1][1] for points in runs])} | {', '.join(texts)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    options = study_options(__doc__, "distillation-run")
    folder, constant = options.folder, "model.optimizer.lr_scheduler_type=constant"
    teacher = supervised_model(folder, "teacher", 2 * HIDDEN, TEACHER_STEPS)
    student = supervised_model(folder, "student", HIDDEN, SFT_STEPS, constant)
    accuracy = held_out_accuracy(folder, "teacher-valid", HIDDEN, teacher)
    found = options.map(partial(study, folder, student, teacher), METHODS, SEEDS)
    curves = {method: runs for (method,), runs in found.items()}
    (HERE / "results.json").write_text(json.dumps({"teacher": accuracy, "curves": curves}, indent=1))
    (HERE / "table.md").write_text(table(curves, accuracy))
    means = {method.removeprefix("distill, "): mean_curve(runs) for method, runs in curves.items()}
    (HERE / "curves.svg").write_text(curves_svg("Accuracy on held-out sums by sampled tokens", means))


if __name__ == "__main__":
    main()
