"""Over-optimisation of one reward model and of ensembles of five, in best of n and in PPO; a larger model is gold.

    python -m experiments.rm_ensemble.study [FOLDER] [--jobs N]

Runs in FOLDER (default: rm-ensemble-run; finished runs are kept), writes results.json, table.md and figure.svg.
"""

import json
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from experiments.rm_ensemble.models import GROUPS, MEMBERS, POLICY, Models, train_models, write_rows
from experiments.studies import Results, Study, Verdict, cell, markdown, mean_and_error, verdict_of
from experiments.sums import StudyOptions, metrics, run
from realhf.api.config.preference import EnsembleConfig, Objective
from realhf.base.best_of_n import expected_best, grid_of, kl_of_best
from realhf.experiments.bon import by_prompt
from realhf.experiments.restem import read_generations
from realhf.ops.ensemble import combine

HERE = Path(__file__).parent
PROMPTS, RESPONSES = 50, 2048
GRID = grid_of(RESPONSES)
OBJECTIVES = ("single", "mean", "WCO", "UWO")
ENSEMBLES = OBJECTIVES[1:]
UWO_WEIGHT = {"bon": 0.5, "ppo": 0.1}
KL = (0.0, 0.01, 0.1)
SEEDS = MEMBERS
STEPS, EVERY = 60, 5
READ = (1, *range(EVERY, STEPS + 1, EVERY))
PPO = ("dataset.train_bs_n_seqs=64", "ppo.group_size=2", "ppo.gen.max_new_tokens=32", "actor.optimizer.lr=5e-4",
       "critic.optimizer.lr=1e-3", "actor.optimizer.lr_scheduler_type=constant", "score.normalise=True",
       "critic.optimizer.lr_scheduler_type=constant", "n_logged_generations=-1", f"exp_ctrl.total_train_steps={STEPS}",
       "exp_ctrl.total_train_epochs=100")  # fmt: skip
Floats = NDArray[np.float64]


def scored_responses(folder: Path, models: Models) -> tuple[Floats, Floats]:
    """Return the scores of all members, ``[members, prompts, responses]``, and those of the gold scorer."""
    lines = (folder / f"task{POLICY}" / "valid.jsonl").read_text().splitlines(keepends=True)
    prompts = folder / "bon.jsonl"
    prompts.write_text("".join(lines[:PROMPTS]))
    members = [path for group in models.groups.values() for path in group]
    root = run(folder, "bon", "score", f"dataset.path={prompts}", "dataset.train_bs_n_seqs=1", "score.normalise=True",
               f"policy.path={models.policy}", f"sampling.n={RESPONSES}", "sampling.max_new_tokens=32",
               f"ensemble.members=[{','.join(map(str, members))}]", f"gold.path={models.gold}")  # fmt: skip
    rows = by_prompt(read_generations(root))
    keys = [f"score_{i}" for i in range(len(members))]
    scores = np.array([[[row[key] for row in some] for some in rows] for key in keys])
    return scores, np.array([[row["gold"] for row in some] for some in rows])


def best_of_n(scores: Floats, gold: Floats, objective: str) -> Floats:
    """Return the expected gold score of the best of n by members or an ensemble, ``[prompts, n]``."""
    if objective == "single":
        return np.mean([best_of_n(one[None], gold, "mean") for one in scores], axis=0)
    config = EnsembleConfig([], Objective[objective], UWO_WEIGHT["bon"])
    combined = combine(scores.reshape(len(scores), -1), config).reshape(gold.shape)
    return np.array([expected_best(*pair, GRID)[1] for pair in zip(combined, gold, strict=True)])


def drop(curves: Floats) -> tuple[float, float]:
    """Return the drop from the peak of the mean curve to its end, paired by curve, with its standard error."""
    peak = int(np.argmax(curves.mean(axis=0)))
    return mean_and_error(list(curves[:, peak] - curves[:, -1]))


def correlations(scores: Floats, gold: Floats) -> dict[str, float]:
    """Return mean correlations over prompts: of members with the gold scorer, with each other, and of their errors.

    An error is what remains of a member's scores after a linear fit to the gold scores.
    """
    found: dict[str, list[float]] = {"gold": [], "members": [], "errors": []}
    for p, truth in enumerate(gold):
        some = scores[:, p]
        errors = [one - np.polyval(np.polyfit(truth, one, 1), truth) for one in some]
        found["gold"] += [float(np.corrcoef(one, truth)[0, 1]) for one in some]
        for key, rows in (("members", list(some)), ("errors", errors)):
            found[key] += [float(np.corrcoef(*pair)[0, 1]) for pair in combinations(rows, 2)]
    return {key: fmean(values) for key, values in found.items()}


def best_of_n_results(folder: Path, models: Models) -> Results:
    scores, gold = scored_responses(folder, models)
    scale = gold.mean(), gold.std()
    gold = (gold - scale[0]) / scale[1]
    groups = {group: scores[i * len(MEMBERS) : (i + 1) * len(MEMBERS)] for i, group in enumerate(GROUPS)}
    curves = {group: {name: best_of_n(some, gold, name) for name in OBJECTIVES} for group, some in groups.items()}
    gains = {name: list(curves["own"][name][:, -1] - curves["shared"][name][:, -1]) for name in ENSEMBLES}
    sizes = {
        group: [fmean(best_of_n(some[list(pick)], gold, "mean")[:, -1].mean() for pick in combinations(range(5), k))
                for k in range(1, len(MEMBERS) + 1)]
        for group, some in groups.items()
    }  # fmt: skip
    return {
        "scale": scale,
        "curves": {group: {name: [mean_and_error(list(column)) for column in found.T] for name, found in some.items()}
                   for group, some in curves.items()},
        "best": [mean_and_error(list(column)) for column in best_of_n(gold[None], gold, "mean").T],
        "drops": {group: {name: drop(found) for name, found in some.items()} for group, some in curves.items()},
        "own_gain": {name: mean_and_error(found) for name, found in gains.items()},
        "members": sizes,
        "correlations": {group: correlations(some, gold) for group, some in groups.items()},
    }  # fmt: skip


def ppo_run(folder: Path, models: Models, objective: str, kl: float, seed: int) -> dict[str, Any]:
    """Train against one member, that of the seed, or against all; return proxy scores, KL and the run's folder."""
    members = models.groups["own"]
    rewards = [f"rew.path={members[seed - 1]}"]
    if objective != "single":
        rewards = [f"ensemble.members=[{','.join(map(str, members))}]", f"ensemble.objective={objective}",
                   f"ensemble.uwo_weight={UWO_WEIGHT['ppo']}"]  # fmt: skip
    root = run(folder, f"ppo-{objective}-{kl}-{seed}", "ppo", f"dataset.path={folder}/task{POLICY}/train.jsonl",
               f"actor.path={models.policy}", *rewards, *PPO, f"ppo.kl_ctl={kl}", f"seed={seed}")  # fmt: skip
    lines = [metrics(root)[step - 1] for step in READ]
    return {"root": str(root), "proxy": [line["reward/mean"] for line in lines],
            "kl": [line["actor_train/kl_per_response"] for line in lines]}  # fmt: skip


def responses_of(root: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "generations" / f"step_{step}.jsonl").read_text().splitlines()]


def ppo_results(options: StudyOptions, models: Models, scale: tuple[float, float]) -> Results:
    """Train against every objective; the gold scores of responses have the scale of best of n."""
    found = options.map(partial(ppo_run, options.folder, models), list(OBJECTIVES), list(KL), SEEDS)
    runs = [one for some in found.values() for one in some]
    rows = ({"prompt": row["prompt"], "answer": row["response"], "place": [i, j]}
            for i, one in enumerate(runs) for j, step in enumerate(READ)
            for row in responses_of(Path(one["root"]), step))  # fmt: skip
    data = write_rows(options.folder / "ppo-responses.jsonl", rows)
    root = run(options.folder, "ppo-gold", "score", f"dataset.path={data}", f"rew.path={models.gold}",
               "dataset.train_bs_n_seqs=2048")  # fmt: skip
    sums = np.zeros((2, len(runs), len(READ)))
    for row in read_generations(root):
        i, j = row["fields"]["place"]
        sums[:, i, j] += row["rewards"], 1
    golds = (sums[0] / sums[1] - scale[0]) / scale[1]
    for one, gold in zip(runs, golds, strict=True):
        one["gold"] = list(gold)
        del one["root"]
    return {f"{name}, KL {kl:g}": some for (name, kl), some in found.items()}


def collect(options: StudyOptions) -> Results:
    models = train_models(options)
    bon = best_of_n_results(options.folder, models)
    return {"accuracies": models.accuracies, "bon": bon, "ppo": ppo_results(options, models, bon["scale"])}


def ppo_drop(results: Results, objective: str, kl: float) -> tuple[float, float]:
    return drop(np.array([one["gold"] for one in results["ppo"][f"{objective}, KL {kl:g}"]]))


def verdict(results: Results) -> Verdict:
    bon = results["bon"]
    falls = {"best of n": bon["drops"]["own"],
             "PPO, KL 0.01": {name: ppo_drop(results, name, 0.01) for name in OBJECTIVES}}  # fmt: skip
    conditions = []
    for some in falls.values():
        conditions.append(some["single"][0] >= 2 * some["single"][1] and some["single"][0] > 0)
        conditions.append(all(some[name][0] <= some[name][1] for name in ENSEMBLES))
    conditions.append(all(mean > error for mean, error in bon["own_gain"].values()))
    parts = [f"{what}: " + ", ".join(f"{name} {mean:.2f} +- {error:.2f}" for name, (mean, error) in some.items())
             for what, some in falls.items()]  # fmt: skip
    gains = ", ".join(f"{name} {mean:+.2f} +- {error:.2f}" for name, (mean, error) in bon["own_gain"].items())
    return verdict_of(conditions, f"drops after the peak, {'; '.join(parts)}; own less shared: {gains}")


def pairs_of(values: Sequence[tuple[float, float]]) -> list[str]:
    return [f"{mean:.2f} +- {error:.2f}" for mean, error in values]


def table(results: Results) -> str:
    bon, shown = results["bon"], [i for i, n in enumerate(GRID) if n in (1, 4, 16, 64, 256, 2048)]
    header = ["best of n by", *(f"n={GRID[i]}" for i in shown), "drop"]
    rows = [[f"{group}: {name}", *pairs_of([curve[i] for i in shown]), *pairs_of([bon["drops"][group][name]])]
            for group, some in bon["curves"].items() for name, curve in some.items()]  # fmt: skip
    rows.append(["gold", *pairs_of([bon["best"][i] for i in shown]), ""])
    text = markdown(header, rows)
    rows = [[group, cell(results["accuracies"][group]), *(f"{some[key]:.2f}" for key in ("gold", "members", "errors")),
             *(f"{value:.2f}" for value in bon["members"][group])]
            for group, some in bon["correlations"].items()]  # fmt: skip
    text += "\n" + markdown(["members", "held-out accuracy", "correlation with gold", "with each other", "of errors",
                             *(f"best of {RESPONSES} by {k}" for k in range(1, len(MEMBERS) + 1))], rows)  # fmt: skip
    rows = []
    for name, runs in results["ppo"].items():
        objective, _, kl = name.partition(", KL ")
        rows.append([name, cell([max(one["gold"]) for one in runs], 2), cell([one["gold"][-1] for one in runs], 2),
                     *pairs_of([ppo_drop(results, objective, float(kl))]), cell([one["proxy"][-1] for one in runs], 2),
                     cell([one["kl"][-1] for one in runs], 1)])  # fmt: skip
    return text + "\n" + markdown(["PPO against", "best gold", "last gold", "drop", "last proxy", "last KL"], rows)


def draw_curve(panel: Any, x: Sequence[float], points: Sequence[tuple[float, float]], label: str) -> None:
    means, errors = np.array(points).T
    panel.plot(x, means, label=label)
    panel.fill_between(x, means - errors, means + errors, alpha=0.25)


def draw(results: Results, figure: Figure) -> None:
    bon, panels = results["bon"], figure.subplots(2, 3)
    kls = [kl_of_best(n) for n in GRID]
    for panel, (group, some) in zip(panels[0], bon["curves"].items(), strict=True):
        for name, points in some.items():
            draw_curve(panel, kls, points, name)
        panel.set(xlabel="KL from the policy, nats", ylabel="gold score, deviations", title=f"best of n, {group}")
    for panel, kl in zip(panels[1], KL, strict=True):
        for name in OBJECTIVES:
            golds = zip(*(one["gold"] for one in results["ppo"][f"{name}, KL {kl:g}"]), strict=True)
            draw_curve(panel, READ, [mean_and_error(list(column)) for column in golds], name)
        panel.set(xlabel="step", ylabel="gold score, deviations", title=f"PPO, KL coefficient {kl:g}")
    panels[0][0].legend(fontsize=7)


STUDY = Study(HERE, __doc__ or "", collect, verdict, table, draw, (10, 6))

if __name__ == "__main__":
    STUDY.main()
