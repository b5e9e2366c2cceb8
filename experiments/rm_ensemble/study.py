"""One reward model against ensembles of three, in best of n and in PPO, on sums; a verifier gives the gold scores.

    python experiments/rm_ensemble/study.py [FOLDER]

Runs everything in FOLDER (default: rm-ensemble-run) and writes results.json, table.md and curves.svg to this folder.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from html import escape
from itertools import chain, combinations
from pathlib import Path
from statistics import correlation, mean
from typing import Any

import numpy as np

from realhf.api.config import ModelSpec
from realhf.api.config.preference import EnsembleConfig, Objective
from realhf.apps.view.timeline_svg import COLOURS, ticks
from realhf.base.best_of_n import expected_best
from realhf.experiments.bon import best_of_n, by_prompt
from realhf.experiments.options.models import score_moments
from realhf.experiments.restem import newest_model, read_generations
from realhf.ops.ensemble import combine

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
SEEDS = (1, 2, 3)
SFT_STEPS, PREFERENCE_PROMPTS, PPO_STEPS, VERIFY_EVERY = 90, 1500, 60, 5
OBJECTIVES = {"single": "", "mean": "mean", "WCO": "WCO", "UWO": "UWO"}
Point = dict[str, float]
Series = dict[str, list[tuple[float, float]]]


def run_python(*arguments: object) -> None:
    subprocess.run([sys.executable, *map(str, arguments)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def quickstart(root: Path, trial: str, experiment: str, *words: str, config: str = "") -> Path:
    """Run ``realhf quickstart`` and return the run directory."""
    place = [f"fileroot={root.parent}", f"experiment_name={root.name}", f"trial_name={trial}", "overwrite=True"]
    file = ["--config", HERE / config] if config else []
    run_python("-m", "realhf", "quickstart", experiment, *file, *place, "device=cpu", "n_gpus_per_node=2", *words)
    return root / trial


def head(source: Path, target: Path, n: int) -> Path:
    target.write_text("".join(source.read_text().splitlines(keepends=True)[:n]))
    return target


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def train_policy(root: Path) -> str:
    """Return a policy that solves some of the sums."""
    task = root / "task"
    run_python(EXAMPLES / "arithmetic.py", task, "--hidden", 96, "--layers", 3)
    run = quickstart(
        root, "sft", "sft", f"dataset.path={task}/sft.jsonl", "dataset.train_bs_n_seqs=64",
        "model.init_from_scratch=True", f"model.config={task}/model", f"model.tokenizer={task}/tokenizer",
        "model.optimizer.lr=3e-3", "model.optimizer.lr_scheduler_type=constant",
        f"exp_ctrl.total_train_steps={SFT_STEPS}", "exp_ctrl.total_train_epochs=10",
    )  # fmt: skip
    return str(newest_model(run))


def proxies(root: Path, policy: str) -> tuple[list[str], list[Point]]:
    """Return reward models that differ only in their seeds, and their metrics on held-out pairs."""
    prompts = head(root / "task" / "train.jsonl", root / "asked.jsonl", PREFERENCE_PROMPTS)
    run = quickstart(
        root, "answers", "gen", f"dataset.path={prompts}", "dataset.train_bs_n_seqs=100", f"model.path={policy}",
        "sampling.n=8", "sampling.max_new_tokens=32", "judge=True", "reward.wrong_reward=0",
    )  # fmt: skip
    pairs = root / "pairs.jsonl"
    run_python(EXAMPLES / "build_pairs.py", run / "generations", pairs, "--max-pairs", 4)
    models, metrics = [], []
    for seed in SEEDS:
        where = [f"dataset.path={pairs}", f"model.path={policy}", f"seed={seed}"]
        run = quickstart(root, f"rw{seed}", "rw", *where, config="rw.yaml")
        models.append(str(newest_model(run)))
        metrics.append(read_lines(run / "evaluation.jsonl")[-1]["metrics"])
    return models, metrics


def on_one_scale(run: Path, models: Sequence[str]) -> dict[str, Any]:
    """Return the curves with the scores of each member normalised by their held-out mean and deviation."""
    prompts = by_prompt(read_generations(run / "scored"))
    for i, model in enumerate(models):
        moments = score_moments(ModelSpec(model))
        assert moments is not None, f"{model} was trained with held-out rows"
        for row in chain(*prompts):
            row[f"score_{i}"] = (row[f"score_{i}"] - moments[0]) / moments[1]
    curves = best_of_n(prompts, EnsembleConfig(list(models), uwo_weight=0.5), [])["curves"]
    return {f"{name}, one scale": curves[name] for name in ("mean", "WCO", "UWO")}


def agreement(run: Path) -> dict[str, float]:
    """Return the correlations of members with the verifier and with each other, as means over prompts.

    Prompts whose responses all have the same score are skipped.
    """
    correlations: dict[str, list[float]] = {"with the verifier": [], "with each other": []}
    for responses in by_prompt(read_generations(run / "scored")):
        columns = [[row[f"score_{i}"] for row in responses] for i in range(len(SEEDS))]
        gold = [row["gold"] for row in responses]
        pairs = [("with the verifier", (column, gold)) for column in columns]
        pairs += [("with each other", pair) for pair in combinations(columns, 2)]
        for kind, (one, other) in pairs:
            if len(set(one)) > 1 and len(set(other)) > 1:
                correlations[kind].append(correlation(one, other))
    return {kind: mean(values) for kind, values in correlations.items()}


def gains(run: Path, grid: Sequence[int]) -> dict[str, list[Point]]:
    """Return the paired differences in accuracy between each objective and one member: mean, standard error.

    The differences are paired by prompt, because all curves use the same responses.
    """
    differences: dict[str, list[np.ndarray]] = {objective.name: [] for objective in Objective}
    for responses in by_prompt(read_generations(run / "scored")):
        scores = np.array([[row[f"score_{i}"] for row in responses] for i in range(len(SEEDS))])
        gold = [row["gold"] for row in responses]
        member = np.mean([expected_best(one, gold, grid)[1] for one in scores], axis=0)
        for objective in Objective:
            combined = combine(scores, EnsembleConfig([], objective, uwo_weight=0.5))
            differences[objective.name].append(expected_best(combined, gold, grid)[1] - member)
    return {
        name: [
            {"n": n, "gain": float(np.mean(some)), "stderr": float(np.std(some, ddof=1) / len(some) ** 0.5)}
            for n, some in zip(grid, np.transpose(rows), strict=True)
        ]
        for name, rows in differences.items()
    }


def ppo(root: Path, name: str, policy: str, models: Sequence[str]) -> list[Point]:
    """Train against a proxy; return the proxy and gold scores of the responses of some steps."""
    members = f"ensemble.members=[{','.join(models)}]"
    rewards = [members, f"ensemble.objective={OBJECTIVES[name]}"] if OBJECTIVES[name] else [f"rew.path={models[0]}"]
    where = [f"dataset.path={root}/task/train.jsonl", f"actor.path={policy}"]
    steps = f"exp_ctrl.total_train_steps={PPO_STEPS}"
    run = quickstart(root, f"ppo-{name}", "ppo", *where, *rewards, steps, config="ppo.yaml")
    verified = [step for step in range(1, PPO_STEPS + 1) if step % VERIFY_EVERY == 0 or step == 1]
    rows_of_prompt = {
        row["prompt"]: row for row in read_lines(root / "task" / "train.jsonl")
    }  # the verifier's solutions
    answers = root / f"ppo-{name}.jsonl"
    with answers.open("w") as file:
        for step in verified:
            for row in read_lines(run / "generations" / f"step_{step}.jsonl"):
                file.write(json.dumps({**rows_of_prompt[row["prompt"]], **row, "step": step}) + "\n")
    run_gold = quickstart(root, f"gold-{name}", "score", f"dataset.path={answers}", f"rew.path={models[0]}",
                          "judge=True", "dataset.train_bs_n_seqs=128")  # fmt: skip
    metrics = read_lines(run / "metrics.jsonl")
    gold: dict[int, list[float]] = {}
    for row in read_generations(run_gold):
        gold.setdefault(row["fields"]["step"], []).append(row["gold"])
    return [{"step": step, "kl": metrics[step - 1]["actor_train/kl_per_response"],
             "proxy": metrics[step - 1]["reward/mean"], "gold": mean(gold[step])} for step in verified]  # fmt: skip


def bon_series(result: dict[str, Any], key: str) -> Series:
    curves = result["curves"]
    shown = {"single": [curves[f"member_{i}"] for i in range(len(SEEDS))]}
    names = ["mean", "WCO", "UWO"]
    if key == "gold_score":  # scores on another scale are not drawn beside these
        names += ["gold", *(name for name in curves if name.endswith("one scale"))]
    shown |= {name: [curves[name]] for name in names}
    return {name: [(points[0]["kl"], mean(p[key] for p in points)) for points in zip(*several, strict=True)]
            for name, several in shown.items()}  # fmt: skip


def panel(title: str, x_label: str, series: Series, place: tuple[int, int]) -> str:
    """Draw lines in a panel with its upper left corner at ``place``."""
    width, height, left, top = 400, 220, 50, 30
    xs, ys = ([point[i] for line in series.values() for point in line] for i in (0, 1))
    low, high = min(ys), max(ys)
    high = high if high > low else low + 1.0
    middle, bottom = (left + width) / 2, top + height
    parts = [
        f'<svg x="{place[0]}" y="{place[1]}" width="{width + 130}" height="{height + 80}">',
        f'<text x="{left}" y="18" font-weight="bold">{escape(title)}</text>',
        f'<rect x="{left}" y="{top}" width="{width - left}" height="{height}" fill="none" stroke="#bbb"/>',
        f'<text x="{middle}" y="{bottom + 32}" text-anchor="middle">{escape(x_label)}</text>',
    ]

    def at(x: float, y: float) -> tuple[float, float]:
        return left + x / max(xs) * (width - left), top + height * (high - y) / (high - low)

    parts += [f'<text x="{at(x, low)[0]:.1f}" y="{bottom + 16}" text-anchor="middle">{x:.3g}</text>'
              for x in ticks(max(xs))]  # fmt: skip
    parts += [f'<text x="{left - 5}" y="{at(0, y)[1] + 4:.1f}" text-anchor="end">{y:.2f}</text>' for y in (low, high)]
    for i, (name, line) in enumerate(series.items()):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[i]}" stroke-width="2"/>')
        parts.append(f'<text x="{width + 8}" y="{top + 14 + 16 * i}" fill="{COLOURS[i]}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"])


def picture(results: dict[str, Any]) -> str:
    bon, ppos = results["bon"], results["ppo"]
    panels = []
    for column, (value, words) in enumerate((("proxy", "score by its own proxy"), ("gold", "share of right answers"))):
        lines = {name: line for name, line in bon_series(bon, f"{value}_score").items() if name != "gold"}
        drawn = [("best of n", "KL from the policy, nats", lines)]
        for across, axis in (("step", "step"), ("kl", "KL from the reference, nats per answer")):
            lines = {name: [(p[across], p[value]) for p in points] for name, points in ppos.items()}
            drawn.append(("PPO", axis, lines))
        panels += [panel(f"{what}: {words}", axis, lines, (530 * column, 300 * row))
                   for row, (what, axis, lines) in enumerate(drawn)]  # fmt: skip
    return "\n".join(['<svg xmlns="http://www.w3.org/2000/svg" width="1060" height="900" font-family="sans-serif" '
                      'font-size="11"><rect width="1060" height="900" fill="#fff"/>', *panels, "</svg>"])  # fmt: skip


def table(results: dict[str, Any]) -> str:
    series = bon_series(results["bon"], "gold_score")
    grid = [entry["n"] for entry in results["bon"]["entries"]]
    lines = [f"| best of n, chosen by | {' | '.join(f'n={n}' for n in grid)} |", "|---" * (len(grid) + 1) + "|"]
    for name, line in series.items():
        label = {"single": "one member, mean of three", "gold": "the verifier"}.get(name, name)
        lines.append(f"| {label} | {' | '.join(f'{y:.3f}' for _, y in line)} |")
    for name, points in results["gains"].items():
        cells = " | ".join(f"{100 * p['gain']:+.1f} ({100 * p['stderr']:.1f})" for p in points)
        lines.append(f"| {name} less one member, points (standard error) | {cells} |")
    lines += ["", "| PPO against | right at first | right at last | best | KL at last, nats | proxy at last |",
              "|---" * 6 + "|"]  # fmt: skip
    for name, points in results["ppo"].items():
        golds, last = [p["gold"] for p in points], points[-1]
        lines.append(f"| {name} | {golds[0]:.3f} | {golds[-1]:.3f} | {max(golds):.3f} | {last['kl']:.2f} | "
                     f"{last['proxy']:.2f} |")  # fmt: skip
    accuracies = ", ".join(f"{found['rw_eval/accuracy']:.3f}" for found in results["proxies"])
    agreed = ", ".join(f"{value:.2f} {kind}" for kind, value in results["agreement"].items())
    return "\n".join([*lines, "", f"Held-out accuracy of the three proxies: {accuracies}. Among answers to a prompt "
                      f"their scores correlate {agreed}. Everything took {results['seconds']:.0f} s.", ""])  # fmt: skip


def main() -> None:
    root, began = Path(sys.argv[1] if len(sys.argv) > 1 else "rm-ensemble-run"), time.monotonic()
    policy = train_policy(root)
    models, accuracies = proxies(root, policy)
    where = [f"dataset.path={root}/task/valid.jsonl", f"policy.path={policy}"]
    run = quickstart(root, "bon", "bon", *where, f"ensemble.members=[{','.join(models)}]", config="bon.yaml")
    results: dict[str, Any] = {"proxies": accuracies, "bon": json.loads((run / "bon.json").read_text())}
    results["gains"] = gains(run, [entry["n"] for entry in results["bon"]["entries"]])
    results["agreement"] = agreement(run)
    results["bon"]["curves"] |= on_one_scale(run, models)
    results["bon"]["members"] = [f"seed {seed}" for seed in SEEDS]
    results["ppo"] = {name: ppo(root, name, policy, models) for name in OBJECTIVES}
    results["seconds"] = time.monotonic() - began
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (HERE / "table.md").write_text(table(results))
    (HERE / "curves.svg").write_text(picture(results))
    print(table(results))


if __name__ == "__main__":
    main()
