"""Estimators of the KL divergence in the loss and in the reward: enumeration, and GRPO on sums.

    python -m experiments.kl.study [FOLDER] [--jobs N]

Runs everything in FOLDER (default: kl-run; finished runs are kept), writes results.json, table.md and figure.svg here.
"""

from functools import partial
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from experiments.kl.enumeration import best_reward, bias, optimum
from experiments.studies import Results, Study, Verdict, cell, markdown, mean_and_error, verdict_of
from experiments.sums import StudyOptions, curve, metrics, run, start_model, task_options
from realhf.api.config import KLEstimator

HERE = Path(__file__).parent
COLOURS = ("#d1495b", "#00798c")
ESTIMATORS, PLACES, BETAS, SEEDS = ("k1", "k2", "k3", "k4"), ("loss", "reward"), (0.1, 1.0), (1, 2, 3, 4, 5)
HIDDEN, SFT_STEPS, STEPS, PROMPTS, LAST = 64, 120, 60, 32, 10
FACTOR = 5.0
FREE = "reward/k1/0.0"  # no penalty, with the reference
OPTIONS = ("ppo.group_size=4", "ppo.advantage=rloo", "ppo.loss_aggregation=seq_sum", "actor.optimizer.lr=5e-4",
           "actor.optimizer.lr_scheduler_type=constant")  # fmt: skip


def train(folder: Path, model: Path, case: str, seed: int) -> dict[str, float]:
    """Return held-out accuracy at the end, and the KL per response over the last steps."""
    place, estimator, beta = case.split("/")
    options = [f"ppo.kl_in={place}", f"ppo.kl_{place}_estimator={estimator}", f"ppo.kl_ctl={beta}"]
    task = task_options(folder, HIDDEN, model, PROMPTS, STEPS, STEPS)
    root = run(folder, f"{place}-{estimator}-{beta}-{seed}", "grpo", *task, *OPTIONS, *options, f"seed={seed}")
    kl = [line["actor_train/kl_per_response"] for line in metrics(root) if "actor_train/kl_per_response" in line]
    found = {"accuracy": curve(root)[-1][1], "kl": fmean(kl[-LAST:])}
    print(f"{place} {estimator} {beta} seed {seed}: {found}", flush=True)
    return found


def enumerate_all() -> Results:
    """Return biases over twenty policies, and optima over five, by place and estimator."""
    places = [(place, estimator) for place in PLACES for estimator in ESTIMATORS]
    biases = {f"{place}/{name}": [bias(KLEstimator[name], place, seed) for seed in range(20)] for place, name in places}
    optima = {f"{place}/{name}/{beta}": [optimum(KLEstimator[name], place, beta, seed) for seed in SEEDS]
              for place, name in places for beta in BETAS}  # fmt: skip
    best = {f"{beta}": [best_reward(beta, seed) for seed in SEEDS] for beta in BETAS}
    return {"biases": biases, "optima": optima, "best": best}


def verdict(results: Results) -> Verdict:
    kl = {case: fmean(run["kl"] for run in runs) for case, runs in results["sums"].items()}
    free, others = kl["loss/k1/1.0"], [kl[f"loss/{name}/1.0"] for name in ("k2", "k3", "k4")]
    biases = {case: fmean(run["bias"] for run in runs) for case, runs in results["biases"].items()}
    optima = {case: fmean(run["kl"] for run in runs) for case, runs in results["optima"].items()}
    best = {beta: fmean(run["kl"] for run in runs) for beta, runs in results["best"].items()}
    off = max(abs(optima[f"reward/k1/{beta}"] / best[f"{beta}"] - 1) for beta in BETAS)
    conditions = [free > FACTOR * max(others), biases["reward/k1"] < 1e-6 and biases["loss/k1"] > 0.99, off < 0.05]
    figures = (f"KL per response at beta 1: {free:.2f} nats with k1 in the loss, at most {max(others):.2f} with k2, k3 "
               f"or k4; bias of k1 in the reward {biases['reward/k1']:.0e}; its optimum is within {off:.1%} of the "
               "exact one")  # fmt: skip
    return verdict_of(conditions, figures)


def table(results: Results) -> str:
    rows = [[case.replace("/", ", ")] + [cell([run[key] for run in runs]) for key in ("kl", "accuracy")]
            for case, runs in results["sums"].items()]  # fmt: skip
    exact = [[case.replace("/", ", "), cell([run["bias"] for run in runs]), cell([run["cosine"] for run in runs]),
              *(cell([run["kl"] for run in results["optima"][f"{case}/{beta}"]]) for beta in BETAS)]
             for case, runs in results["biases"].items()]  # fmt: skip
    exact.append(
        ["optimal policy", "", "", *(cell([run["kl"] for run in results["best"][f"{beta}"]]) for beta in BETAS)]
    )
    optima = [f"KL at the optimum, beta {beta:g}" for beta in BETAS]
    return "\n".join([
        "GRPO on sums (nats per response over the last ten steps, held-out accuracy):\n",
        markdown(["penalty", "KL", "accuracy"], rows),
        "Enumeration (distance from the gradient of the exact KL, relative to its norm):\n",
        markdown(["penalty", "bias", "cosine", *optima], exact),
    ])  # fmt: skip


def draw(results: Results, figure: Figure) -> None:
    panels = figure.subplots(1, 2, sharex=True)
    for panel, key, label in zip(
        panels, ("kl", "accuracy"), ("KL per response (nats)", "held-out accuracy"), strict=True
    ):
        for shift, place in enumerate(PLACES):
            for beta, marker in zip(BETAS, ("o", "s"), strict=True):
                runs = [results["sums"][f"{place}/{name}/{beta}"] for name in ESTIMATORS]
                means, errors = zip(*(mean_and_error([run[key] for run in some]) for some in runs), strict=True)
                x = [i + 0.12 * shift - 0.06 for i in range(len(ESTIMATORS))]
                panel.errorbar(x, means, yerr=errors, fmt=marker, capsize=3, color=COLOURS[shift],
                               fillstyle="full" if beta == 1.0 else "none",
                               label=f"in the {place}, beta {beta:g}")  # fmt: skip
        free, error = mean_and_error([run[key] for run in results["sums"][FREE]])
        panel.axhspan(free - error, free + error, color="#ccc", label="no penalty")
        panel.set(xlabel="estimator", ylabel=label, xticks=range(len(ESTIMATORS)), xticklabels=ESTIMATORS)
    panels[0].set_yscale("log")
    panels[1].legend(fontsize=7)


def collect(options: StudyOptions) -> Results:
    model = start_model(options.folder, HIDDEN, SFT_STEPS)
    cases = [FREE] + [f"{place}/{name}/{beta}" for place in PLACES for name in ESTIMATORS for beta in BETAS]
    found = options.map(partial(train, options.folder, model), cases, SEEDS)
    return {"sums": {case: runs for (case,), runs in found.items()}, **enumerate_all()}


STUDY = Study(HERE, __doc__ or "", collect, verdict, table, draw, (9, 3.6))

if __name__ == "__main__":
    STUDY.main()
