"""One PPO run in twelve layouts: differences of weights and of sampled tokens.

    python -m experiments.layouts.study [FOLDER]

Runs everything in FOLDER (default: layouts-run; finished runs are kept), writes results.json, table.md and figure.svg.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file

from experiments.studies import Results, Study, Verdict, markdown, verdict_of
from experiments.sums import StudyOptions, curve, run, start_model, task_options
from realhf.experiments.restem import read_generations

HERE = Path(__file__).parent
HIDDEN, SFT_STEPS, STEPS, PROMPTS, GROUP = 64, 120, 20, 32, 4
SEEDS = (1, 2, 3, 4, 5)
LAYOUTS: dict[str, tuple[int, str]] = {
    "d1": (1, "d1"), "d2": (2, "d2"), "t2": (2, "t2"), "p2": (2, "p2"), "d4": (4, "d4"), "t4": (4, "t4"),
    "d2t2": (4, "d2t2"), "d2p2": (4, "d2p2"), "t2p2": (4, "t2p2"),
    "generation d4, training t2p2": (4, "actor_gen:d4,actor_train:d1t2p2,critic_train:d1t2p2,*:d4"),
    "generation t2, training d2p2": (4, "actor_gen:d2t2,actor_train:d2t1p2,critic_train:d2t1p2,*:d4"),
    "generation p2, training d4": (4, "actor_gen:d2t1p2,actor_train:d4,critic_train:d4,*:d2t2"),
}  # fmt: skip
WEIGHTS, TOKENS = 1e-3, 1e-2
Tokens = list[dict[str, Any]]


def train(folder: Path, model: Path, case: str, seed: int) -> Path:
    workers, layout = LAYOUTS[case]
    name = f"{''.join(c if c.isalnum() else '-' for c in case)}-{seed}"
    options = [*task_options(folder, HIDDEN, model, PROMPTS, STEPS, STEPS), f"ppo.group_size={GROUP}",
               "actor.optimizer.lr=3e-4", "critic.optimizer.lr=1e-3", f"n_gpus_per_node={workers}",
               f"allocation_mode={layout}", "n_logged_generations=-1", f"seed={seed}"]  # fmt: skip
    root = run(folder, name, "ppo-math", *options)
    print(f"{case} seed {seed}: {curve(root)[-1][1]:.3f}", flush=True)
    return root


def responses(root: Path) -> list[Tokens]:
    """Return the rows of every step, in the order of prompts and samples."""
    rows, n = list(read_generations(root)), PROMPTS * GROUP  # in the order of steps
    assert len(rows) == STEPS * n
    steps = (rows[i : i + n] for i in range(0, len(rows), n))
    return [sorted(step, key=lambda row: (row["prompt_id"], row["sample"])) for step in steps]


def differences(root: Path, other: Path) -> dict[str, Any]:
    """Return the largest difference of weights relative to the largest weight, and responses that differ, by step."""
    weights = [load_file(place / "models" / "actor" / f"step_{STEPS}" / "model.safetensors") for place in (root, other)]
    largest = max(float(value.abs().max()) for value in weights[0].values())
    difference = max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])
    assert weights[0].keys() == weights[1].keys() and all(torch.isfinite(value).all() for value in weights[1].values())
    different = [sum(one["response"] != two["response"] for one, two in zip(*rows, strict=True))
                 for rows in zip(responses(root), responses(other), strict=True)]  # fmt: skip
    return {"weights": difference / largest, "different": different, "accuracy": curve(other)[-1][1]}


def verdict(results: Results) -> Verdict:
    n = PROMPTS * GROUP
    runs = [one for some in results["layouts"].values() for one in some]
    first = sum(one["different"][0] for one in runs) / (n * len(runs))
    share = sum(sum(one["different"]) for one in runs) / (n * STEPS * len(runs))
    same = [one["weights"] for one in runs if not sum(one["different"])]
    largest = max(same, default=float("inf"))
    figures = (f"responses that differ: {first:.2%} of the first step, {share:.2%} of all; largest difference of "
               f"weights in {len(same)} of {len(runs)} runs with the same responses: {largest:.1e}")  # fmt: skip
    return verdict_of([first <= TOKENS / 10, share <= TOKENS, largest <= WEIGHTS], figures)


def table(results: Results) -> str:
    rows = []
    for case, runs in results["layouts"].items():
        different = sum(sum(one["different"]) for one in runs)
        rows.append([case, f"{max(one['weights'] for one in runs):.1e}",
                     f"{different} of {PROMPTS * GROUP * STEPS * len(runs)}",
                     " ".join(f"{one['accuracy']:.3f}" for one in runs)])  # fmt: skip
    return markdown(["layout", "largest difference of weights", "responses that differ", "accuracy by seed"], rows)


def draw(results: Results, figure: Figure) -> None:
    panel, cases = figure.subplots(), list(results["layouts"])
    for i, case in enumerate(cases):
        for one in results["layouts"][case]:
            marker, colour = ("x", "#d1495b") if sum(one["different"]) else ("o", "#00798c")
            panel.semilogx(max(one["weights"], 1e-9), i, marker, color=colour)
    panel.set(yticks=range(len(cases)), yticklabels=cases, xlabel="largest difference of weights, relative (x: a "
              "response differs)")  # fmt: skip
    panel.invert_yaxis()


def collect(options: StudyOptions) -> Results:
    model = start_model(options.folder, HIDDEN, SFT_STEPS)
    found = options.map(partial(train, options.folder, model), list(LAYOUTS), SEEDS)
    roots = {case: runs for (case,), runs in found.items()}
    compared = {case: [differences(one, other) for one, other in zip(roots["d1"], runs, strict=True)]
                for case, runs in roots.items() if case != "d1"}  # fmt: skip
    return {"layouts": compared}


STUDY = Study(HERE, __doc__ or "", collect, verdict, table, draw, (7, 3.6), jobs=1)

if __name__ == "__main__":
    STUDY.main()
