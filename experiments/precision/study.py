"""GRPO on sums in float32 and in bfloat16: held-out accuracy over the steps.

    python -m experiments.precision.study [FOLDER] [--jobs N]

Runs everything in FOLDER (default: precision-run; finished runs are kept), writes results.json, table.md, figure.svg.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from experiments.studies import Results, Study, Verdict, cell, markdown, mean_and_error, standard_error, verdict_of
from experiments.sums import StudyOptions, curve, run, start_model, task_options

HERE = Path(__file__).parent
HIDDEN, SFT_STEPS, STEPS, PROMPTS, EVAL_EVERY = 64, 120, 100, 32, 10
SEEDS = (1, 2, 3)
TYPES = {"float32": "actor.bf16=False", "bfloat16": "actor.bf16=True"}
OPTIONS = ("ppo.group_size=8", "ppo.ppo_n_minibatches=2", "ppo.kl_ctl=1e-3", "actor.optimizer.lr=2e-4",
           "actor.optimizer.lr_scheduler_type=constant", "exp_ctrl.eval_at_start=True")  # fmt: skip


def train(folder: Path, model: Path, name: str, seed: int) -> list[float]:
    """Return the accuracy at each evaluation."""
    task = task_options(folder, HIDDEN, model, PROMPTS, STEPS, EVAL_EVERY)
    found = [y for _, y in curve(run(folder, f"{name}-{seed}", "grpo", *task, *OPTIONS, TYPES[name], f"seed={seed}"))]
    print(name, seed, *(f"{accuracy:.3f}" for accuracy in found), flush=True)
    return found


def difference(ones: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Return the difference of two means, and its standard error."""
    return fmean(ones) - fmean(others), (standard_error(ones) ** 2 + standard_error(others) ** 2) ** 0.5


def verdict(results: Results) -> Verdict:
    whole = [[fmean(one) for one in results["curves"][name]] for name in TYPES]
    last = [[one[-1] for one in results["curves"][name]] for name in TYPES]
    (of_curves, error), (of_last, last_error) = difference(*whole), difference(*last)
    figures = (f"mean over the curve: float32 {cell(whole[0])}, bfloat16 {cell(whole[1])}; after the last step: "
               f"{cell(last[0])} and {cell(last[1])}")  # fmt: skip
    return verdict_of([abs(of_curves) <= error, abs(of_last) <= 2 * last_error], figures)


def table(results: Results) -> str:
    steps = range(0, STEPS + 1, EVAL_EVERY)
    rows = [[name, *(cell(found) for found in zip(*results["curves"][name], strict=True))] for name in TYPES]
    return markdown(["type", *(f"step {step}" for step in steps)], rows)


def draw(results: Results, figure: Figure) -> None:
    panel, steps = figure.subplots(), range(0, STEPS + 1, EVAL_EVERY)
    for name in TYPES:
        points = [mean_and_error(found) for found in zip(*results["curves"][name], strict=True)]
        means, errors = zip(*points, strict=True)
        panel.errorbar(steps, means, yerr=errors, marker="o", capsize=3, label=name)
    panel.set(xlabel="steps", ylabel="held-out accuracy", ylim=(0, 1))
    panel.legend()


def collect(options: StudyOptions) -> Results:
    model = start_model(options.folder, HIDDEN, SFT_STEPS)
    found = options.map(partial(train, options.folder, model), list(TYPES), SEEDS)
    return {"curves": {name: runs for (name,), runs in found.items()}}


STUDY = Study(HERE, __doc__ or "", collect, verdict, table, draw, (5, 3.4))

if __name__ == "__main__":
    STUDY.main()
