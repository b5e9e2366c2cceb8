"""Rounds of ReST-EM on sums: the accuracy after each round, on training and on held-out prompts.

    python -m experiments.restem.study [FOLDER] [--jobs N]

Runs everything in FOLDER (default: restem-run; finished runs are kept), writes results.json, table.md, figure.svg.
"""

import json
import time
from functools import partial
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from experiments.studies import (
    Results,
    Verdict,
    cell,
    markdown,
    mean_and_error,
    save_figure,
    save_results,
    standard_error,
    verdict_of,
)
from experiments.sums import make_task, metrics, run, study_options, supervised_model

HERE = Path(__file__).parent
HIDDEN, SFT_STEPS, ROUNDS, SEEDS = 64, 120, 4, (1, 2, 3, 4, 5)
CASES = {"1,000 prompts": 1000, "200 prompts": 200}
TEMPERATURE = "temperature=1.0"


def train(folder: Path, model: Path, case: str, seed: int) -> list[dict[str, float]]:
    """Return for each round the number and share of selected samples, and the held-out accuracy after it."""
    prompts = folder / f"train{CASES[case]}-{seed}.jsonl"
    lines = (folder / f"task{HIDDEN}" / "train.jsonl").read_text().splitlines(keepends=True)
    begin = 400 * seed
    prompts.write_text("".join((lines + lines)[begin : begin + CASES[case]]))
    root = run(folder, f"restem-{CASES[case]}-{seed}", "restem", f"model.path={model}", f"dataset.path={prompts}",
               f"valid_path={folder}/task{HIDDEN}/valid.jsonl", "dataset.train_bs_n_seqs=200", f"n_rounds={ROUNDS}",
               "sampling.max_new_tokens=32", f"sampling.{TEMPERATURE}", "sampling.top_p=1.0", "validation.n=4",
               f"validation.{TEMPERATURE}", "validation.max_new_tokens=32", "model.optimizer.lr=1e-3",
               f"seed={seed}")  # fmt: skip
    rounds = json.loads((root / "restem.json").read_text())["rounds"]
    found = [{"kept": one["n_kept"], "share": one["n_kept"] / one["n_answers"], "accuracy": one["accuracy"]}
             for one in rounds]  # fmt: skip
    print(f"{case} seed {seed}: {[round(one['accuracy'], 3) for one in found]}", flush=True)
    return found


def initial_accuracy(folder: Path, model: Path) -> float:
    root = run(folder, "valid", "gen", f"model.path={model}", f"dataset.path={folder}/task{HIDDEN}/valid.jsonl",
               "dataset.train_bs_n_seqs=100", "judge=True", "sampling.n=4", "sampling.max_new_tokens=32")  # fmt: skip
    return fmean(line["rew_inf/accuracy"] for line in metrics(root))


def gains(runs: list[list[dict[str, float]]], start: float) -> list[list[float]]:
    """Return the gain of every round over the one before it, by round and seed."""
    curves = [[start, *(one["accuracy"] for one in rounds)] for rounds in runs]
    return [[curve[i + 1] - curve[i] for curve in curves] for i in range(ROUNDS)]


def verdict(results: Results) -> Verdict:
    found = {case: gains(runs, results["start"]) for case, runs in results["rounds"].items()}
    first, *later = found["1,000 prompts"]
    few = found["200 prompts"]
    turns = [i + 1 for i, gain in enumerate(few) if fmean(gain) + standard_error(gain) < 0]
    conditions = [
        fmean(first) > 2 * standard_error(first),
        all(fmean(gain) < fmean(first) for gain in later),
        bool(turns),
    ]
    by_round = "; ".join(f"{case}: " + ", ".join(cell(gain) for gain in some) for case, some in found.items())
    return verdict_of(conditions, f"gain per round, {by_round}; rounds that lose with few prompts: {turns or 'none'}")


def table(results: Results) -> str:
    rows = []
    for case, runs in results["rounds"].items():
        after = [cell([rounds[i]["accuracy"] for rounds in runs]) for i in range(ROUNDS)]
        rows.append([case, f"{results['start']:.3f}", *after])
    return markdown(["held-out accuracy", "start", *(f"round {i + 1}" for i in range(ROUNDS))], rows)


def draw(results: Results, figure: Figure) -> None:
    panel = figure.subplots()
    for case, runs in results["rounds"].items():
        points = [mean_and_error([rounds[i]["accuracy"] for rounds in runs]) for i in range(ROUNDS)]
        means, errors = zip((results["start"], 0.0), *points, strict=True)
        panel.errorbar(range(ROUNDS + 1), means, yerr=errors, marker="o", capsize=3, label=case)
    panel.set(xlabel="rounds", ylabel="held-out accuracy", xticks=range(ROUNDS + 1))
    panel.legend()


def main() -> None:
    options, began = study_options(__doc__, "restem-run", jobs=2), time.monotonic()
    model = supervised_model(options.folder, "start", HIDDEN, SFT_STEPS, "model.optimizer.lr_scheduler_type=constant")
    make_task(options.folder, HIDDEN)
    found = options.map(partial(train, options.folder, model), list(CASES), SEEDS)
    rounds = {case: runs for (case,), runs in found.items()}
    results: Results = {"start": initial_accuracy(options.folder, model), "rounds": rounds}
    save_results(HERE, results, began, table(results))
    save_figure(HERE / "figure.svg", (5, 3.4), partial(draw, results))
    print(verdict(results))


if __name__ == "__main__":
    main()
