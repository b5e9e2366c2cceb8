"""Bounded staleness on sums: accuracy and speed of GRPO with rollouts that are k steps old, coupled and decoupled.

    python -m experiments.staleness.study [FOLDER]

Runs everything in FOLDER (default: staleness-run; finished runs are kept), writes results.json, table.md, figure.svg.
Every run has two workers, of which one samples and one trains.
"""

from functools import partial
from pathlib import Path
from statistics import fmean, median

from matplotlib.figure import Figure

from experiments.studies import Results, Study, Verdict, cell, markdown, mean_and_error, standard_error, verdict_of
from experiments.sums import StudyOptions, curve, metrics, run, start_model, task_options

HERE = Path(__file__).parent
HIDDEN, SFT_STEPS, STEPS, PROMPTS, GROUP = 64, 120, 100, 32, 8
STALENESS, SEEDS = (0, 1, 2, 4, 8), (1, 2, 3, 4, 5)
LOSSES = {"coupled": (), "decoupled": ("ppo.recompute_logprobs=True", "ppo.importance=tis")}
LAYOUT = ("n_gpus_per_node=2", "allocation_mode='actor_gen:d1@0,*:d1@1'")
OPTIONS = (f"ppo.group_size={GROUP}", "ppo.kl_in=none", "ppo.kl_ctl=0", "ppo.ppo_n_minibatches=2",
           "actor.optimizer.lr=2e-4", "actor.optimizer.lr_scheduler_type=constant")  # fmt: skip
FREE, KEPT = 8, 0.9


def train(folder: Path, model: Path, loss: str, staleness: int, seed: int) -> dict[str, float]:
    """Return held-out accuracy, the difference of log-probabilities, and the median time of a step."""
    task = task_options(folder, HIDDEN, model, PROMPTS, STEPS, STEPS)
    options = (*task, *OPTIONS, *LAYOUT, *LOSSES[loss], f"max_staleness={staleness}", f"seed={seed}")
    root = run(folder, f"{loss}-{staleness}-{seed}", "grpo", *options)
    lines = [line for line in metrics(root) if "time/step_s" in line]
    found = {"accuracy": curve(root)[-1][1], "step_s": median(line["time/step_s"] for line in lines),
             "tokens": sum(line["tokens/generated"] for line in lines)}  # fmt: skip
    print(f"{loss}, {staleness} steps old, seed {seed}: {found}", flush=True)
    return found


def accuracies(results: Results, loss: str, staleness: int) -> list[float]:
    return [one["accuracy"] for one in results["runs"][f"{loss}/{staleness}"]]


def verdict(results: Results) -> Verdict:
    exact = accuracies(results, "decoupled", 0)
    kept = [k for k in STALENESS if fmean(accuracies(results, "decoupled", k))
            >= KEPT * fmean(exact) - standard_error(accuracies(results, "decoupled", k))]  # fmt: skip
    old, corrected = (accuracies(results, loss, FREE) for loss in LOSSES)
    error = (standard_error(old) ** 2 + standard_error(corrected) ** 2) ** 0.5
    seconds = {k: fmean(one["step_s"] for one in results["runs"][f"decoupled/{k}"]) for k in STALENESS}
    conditions = [
        kept == list(STALENESS),
        fmean(corrected) - fmean(old) > 2 * error,
        max(seconds[k] for k in STALENESS if k) < 0.9 * seconds[0],
    ]
    figures = (f"decoupled keeps {KEPT:.0%} of {fmean(exact):.3f} at staleness {kept}; at {FREE}: decoupled "
               f"{cell(corrected)}, coupled {cell(old)}; step {seconds[0]:.2f} s, with staleness "
               f"{min(seconds.values()):.2f} s")  # fmt: skip
    return verdict_of(conditions, figures)


def table(results: Results) -> str:
    rows = [[name.replace("/", ", "), cell([one["accuracy"] for one in runs]), cell([one["step_s"] for one in runs]),
             f"{fmean(one['tokens'] for one in runs):,.0f}"] for name, runs in results["runs"].items()]  # fmt: skip
    return markdown(["loss, staleness", "held-out accuracy", "step (s)", "sampled tokens"], rows)


def draw(results: Results, figure: Figure) -> None:
    panels = figure.subplots(1, 2)
    labels = {"accuracy": "held-out accuracy", "step_s": "step (s)"}
    for panel, (key, label) in zip(panels, labels.items(), strict=True):
        for loss in LOSSES:
            points = [mean_and_error([one[key] for one in results["runs"][f"{loss}/{k}"]]) for k in STALENESS]
            means, errors = zip(*points, strict=True)
            panel.errorbar(STALENESS, means, yerr=errors, marker="o", capsize=3, label=loss)
        panel.set(xlabel="max_staleness (steps)", ylabel=label, xticks=STALENESS, ylim=(0, None))
    panels[0].legend()


def collect(options: StudyOptions) -> Results:
    model = start_model(options.folder, HIDDEN, SFT_STEPS)
    found = options.map(partial(train, options.folder, model), list(LOSSES), STALENESS, SEEDS)
    return {"runs": {f"{loss}/{staleness}": runs for (loss, staleness), runs in found.items()}}


STUDY = Study(HERE, __doc__ or "", collect, verdict, table, draw, (8, 3.4), jobs=1)

if __name__ == "__main__":
    STUDY.main()
