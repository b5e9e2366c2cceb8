"""Held-out accuracy of every algorithm on sums, by sampled tokens.

    python -m experiments.algorithms.study [FOLDER] [--jobs N]

Runs in FOLDER (default: algorithms-run; finished runs are kept), writes results.json, table.md and figure.svg here.
"""

from functools import partial
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from experiments.studies import Results, Study, Verdict, cell, markdown, mean_and_error, standard_error, verdict_of
from experiments.sums import Curve, StudyOptions, curve, run, start_model, task_options

HERE = Path(__file__).parent
HIDDEN, SFT_STEPS, ROWS, TOKENS, N_EVALUATIONS = 64, 120, 128, 500_000, 6
SEEDS = (1, 2, 3, 4, 5)
GROUPS = {"ppo-math": 1, "grpo": 8, "rloo": 4, "reinforce-pp": 4, "remax": 1, "vineppo": 8}
STEPS = {"ppo-math": 140, "grpo": 140, "rloo": 140, "reinforce-pp": 140, "remax": 70, "vineppo": 12}
"""Upper bounds of the steps that sample ``TOKENS`` tokens, with all rollouts that an algorithm needs."""
LEARN = ("actor.optimizer.lr=3e-4", "actor.optimizer.lr_scheduler_type=constant")
OWN = {"ppo-math": ("critic.optimizer.lr=1e-3", "critic.optimizer.lr_scheduler_type=constant")}
CLOSE = 0.1


def train(folder: Path, model: Path, name: str, seed: int) -> Curve:
    """Return the sampled tokens so far and the held-out accuracy at each evaluation."""
    steps, group = STEPS[name], GROUPS[name]
    task = task_options(folder, HIDDEN, model, ROWS // group, steps, max(1, steps // N_EVALUATIONS))
    root = run(folder, f"{name}-{seed}", name, *task, f"ppo.group_size={group}", *LEARN, *OWN.get(name, ()),
               f"seed={seed}")  # fmt: skip
    found = curve(root)
    print(f"{name} seed {seed}: {found[-1]}", flush=True)
    return found


def accuracy_at(points: Curve, tokens: float) -> float:
    """Return the accuracy after a number of sampled tokens, between two evaluations by a line, or at the run's end."""
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if x0 <= tokens <= x1:
            return y0 + (y1 - y0) * (tokens - x0) / max(x1 - x0, 1.0)
    return points[-1][1]


def at_equal_tokens(results: Results) -> dict[str, list[float]]:
    return {name: [accuracy_at(points, TOKENS) for points in runs] for name, runs in results["curves"].items()}


def verdict(results: Results) -> Verdict:
    start = fmean(points[0][1] for runs in results["curves"].values() for points in runs)
    found = at_equal_tokens(results)
    gains = [fmean(values) - start > 2 * standard_error(values) for values in found.values()]
    groups = [fmean(found[name]) for name in ("grpo", "rloo", "reinforce-pp")]
    figures = f"from {start:.3f}: {', '.join(f'{name} {cell(values)}' for name, values in found.items())}"
    return verdict_of([all(gains), max(groups) - min(groups) <= CLOSE], figures)


def table(results: Results) -> str:
    found = at_equal_tokens(results)
    read_at = {name: fmean(min(points[-1][0], TOKENS) for points in runs) for name, runs in results["curves"].items()}
    rows = [[name, f"{STEPS[name]}", f"{read_at[name]:,.0f}", cell(values)] for name, values in found.items()]
    return markdown(["algorithm", "steps at most", "sampled tokens", "held-out accuracy there"], rows)


def draw(results: Results, figure: Figure) -> None:
    panel = figure.subplots()
    for name, runs in results["curves"].items():
        points = list(zip(*runs, strict=True))
        means, errors = zip(*(mean_and_error([y for _, y in some]) for some in points), strict=True)
        xs = [fmean(x for x, _ in some) / 1000 for some in points]
        panel.errorbar(xs, means, yerr=errors, capsize=2, marker=".", label=name)
    panel.set(xlabel="sampled tokens (thousands)", ylabel="held-out accuracy", ylim=(0, 1))
    panel.legend(fontsize=8)


def collect(options: StudyOptions) -> Results:
    model = start_model(options.folder, HIDDEN, SFT_STEPS)
    found = options.map(partial(train, options.folder, model), list(STEPS), SEEDS)
    return {"curves": {name: runs for (name,), runs in found.items()}}


STUDY = Study(HERE, __doc__ or "", collect, verdict, table, draw, (6, 4))

if __name__ == "__main__":
    STUDY.main()
