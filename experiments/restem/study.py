"""Rounds of ReST-EM on sums: the accuracy after each round, on training and on held-out prompts.

    python -m experiments.restem.study [FOLDER] [--jobs N]

Runs everything in FOLDER (default: restem-run; finished runs are kept), writes results.json, table.md, figure.svg.
"""

import json
from functools import partial
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from experiments.studies import Results, Study, Verdict, cell, markdown, mean_and_error, standard_error, verdict_of
from experiments.sums import StudyOptions, held_out_accuracy, run, start_model, training_part

HERE = Path(__file__).parent
HIDDEN, SFT_STEPS, ROUNDS, SEEDS = 64, 120, 4, (1, 2, 3, 4, 5)
CASES = {"1,000 prompts": 1000, "200 prompts": 200}
TEMPERATURE = "temperature=1.0"


def train(folder: Path, model: Path, case: str, seed: int) -> list[dict[str, float]]:
    """Return for each round the number and share of selected samples, and the held-out accuracy after it."""
    prompts = training_part(folder, f"train{CASES[case]}-{seed}", HIDDEN, 400 * seed, CASES[case])
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


def collect(options: StudyOptions) -> Results:
    model = start_model(options.folder, HIDDEN, SFT_STEPS)
    found = options.map(partial(train, options.folder, model), list(CASES), SEEDS)
    rounds = {case: runs for (case,), runs in found.items()}
    return {"start": held_out_accuracy(options.folder, "valid", HIDDEN, model), "rounds": rounds}


STUDY = Study(HERE, __doc__ or "", collect, verdict, table, draw, (5, 3.4))

if __name__ == "__main__":
    STUDY.main()
